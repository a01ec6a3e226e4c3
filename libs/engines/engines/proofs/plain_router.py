"""A router's losses from their formulas, over all rows of a step at once: the oracle of `engines.families.router`."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.execution.executor import LossFunction, Scoring
from engines.execution.micro_batches import MicroBatches
from engines.proofs.plain_executor import PlainExecutor
from engines.prove.plain_loop import router_losses


class PlainRouterExecutor(PlainExecutor):
    """The plain executor on one rank, with the losses of the routers: nothing is split, every graph is kept."""

    adds_loss = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logits: dict[str, list[Tensor]] = {}
        for name, module in self.model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                self.logits[name] = []
                module.register_forward_hook(lambda _m, _i, out, name=name: self.logits[name].append(out[0]))

    def train(self, micro_batches: MicroBatches, loss: LossFunction, scoring: Scoring, add: bool = False) -> None:
        """Run one backward pass of the whole step."""
        if not add:
            self.optimizer.zero_grad()
        for logits in self.logits.values():
            logits.clear()
        scored = [(micro_batch, self._scores(micro_batch, scoring)) for micro_batch in micro_batches]
        share = self.auxiliary() / len(scored)
        total = [loss(micro_batch, replace(scores, auxiliary=share)) for micro_batch, scores in scored]
        torch.stack(total).sum().backward()

    def auxiliary(self) -> Tensor:
        """Return both losses of the routers, with this configuration's coefficients."""
        text = self.model.config.get_text_config()
        override = self.config.router_aux_loss_coef
        coefficient = text.router_aux_loss_coef * text.output_router_logits if override is None else override
        return router_losses(
            list(self.logits.values()), text.num_experts_per_tok, coefficient, self.config.router_z_loss_coef
        )
