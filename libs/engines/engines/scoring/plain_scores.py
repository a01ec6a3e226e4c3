"""Log-probs by the stock model, one sequence at a time: what the engine's own layers and scorer are held to in a run.

1. `stock_modules` takes back what the engine changed in the live model: packed mixers, the last norm as a function,
   norms of a CPU and operators of an NPU. Compiled layers run their stock forward where a call has no packed context.
2. `plain_log_probs` calls the stock model on one row, and takes log-probs from its own logits in plain torch.

What stays: weights (gathered by FSDP as in any call), adapters, the exchange of tokens under expert parallelism, and
experts that a batch names.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from engines.families.torch_operations import choose_torch_operations
from engines.fast.final_norm import FunctionNorm, stock_norm
from engines.inputs.model_inputs import ModelInputs
from engines.media.vision_embeddings import embeddings
from seqpack.adapters.mixers import Adaptation

CHUNK = 512
"""Tokens whose logits are in float32 at once."""


@contextmanager
def stock_modules(model: Any, packing: Adaptation | None) -> Iterator[None]:
    """Give a live model its stock modules inside the block, delta nets in plain torch; then everything is as before.

    `packing`: what adapted it for packed rows; None where it was not.
    """
    with ExitStack() as stack:
        for norm in [module for module in model.modules() if isinstance(module, FunctionNorm)]:
            stack.enter_context(stock_norm(norm))
        if packing is not None:
            stack.enter_context(packing.without())
            stack.callback(choose_torch_operations(model, all_devices=True).undo)
        for applied in reversed([*vars(model).get("_adaptations", {}).values()]):
            stack.enter_context(applied.without())
        yield


def plain_log_probs(scorer: Any, inputs: ModelInputs, temperature: float) -> Tensor:
    """Return f32[N], log-probs of `inputs.targets` by the stock model of a `TokenScorer`; padded inputs of one row."""
    model, family = scorer.model, scorer.family
    decoder, tower = family.decoder(model), family.tower(model)
    call: dict[str, Any] = {
        "attention_mask": inputs.attention_mask,
        "position_ids": inputs.position_ids,
        "use_cache": False,
    }
    if scorer.routers is not None:
        scorer.routers.begin(inputs.experts)
    if tower is None:
        logits = _stock_logits(model, inputs, call)
    else:
        assert inputs.vision is not None, "the inputs of a vision-language model have something to see"
        seen = embeddings(decoder, tower, inputs.input_ids, inputs.vision)
        hidden = decoder(inputs_embeds=seen, **call).last_hidden_state.flatten(0, 1)
        logits = family.head(model)(hidden.index_select(0, inputs.rows))
    if scorer.routers is not None:
        scorer.routers.end(inputs.counted)
    chosen = [
        torch.log_softmax(part.to(torch.promote_types(part.dtype, torch.float32)) / temperature, dim=-1)
        .gather(1, targets.unsqueeze(1))
        .squeeze(1)
        for part, targets in zip(logits.split(CHUNK), inputs.targets.split(CHUNK), strict=True)
    ]
    return torch.cat(chosen)


def _stock_logits(model: Any, inputs: ModelInputs, call: dict[str, Any]) -> Tensor:
    """Return the stock model's logits [N, V] at `inputs.rows`, and no others where it can leave them out."""
    if inputs.rows.numel() and "logits_to_keep" in inspect.signature(model.forward).parameters:
        logits: Tensor = model(input_ids=inputs.input_ids, logits_to_keep=inputs.rows, **call).logits
        return logits.flatten(0, 1)
    every: Tensor = model(input_ids=inputs.input_ids, **call).logits
    return every.flatten(0, 1).index_select(0, inputs.rows)
