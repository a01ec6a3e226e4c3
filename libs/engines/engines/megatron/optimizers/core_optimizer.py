"""megatron-core's own optimizer between its gradient buffers and our norm, clipping and files.

`get_megatron_optimizer` makes FP32Optimizer, Float16OptimizerWithFloat16Params (which computes in float32 beside
bfloat16 layers) or DistributedOptimizer, one for dense parameters and one for experts. Each has an Adam inside:
Transformer Engine's FusedAdam or apex's where one of them is installed, torch's AdamW where none is. Moments and
masters are read and written where they are, so that a checkpoint is that of `megatron.optimizers.buffer_optimizer`, in
any layout. Of its interface only what megatron-core 0.16 and 0.19 have alike is called; its clipping and norm are off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor

from engines.config import EngineConfig
from engines.execution.optimizer import DECAYS, name_of, set_adam
from engines.megatron.optimizers.buffer_optimizer import MOMENTS, Stepped, Updates
from engines.megatron.runtime.cuda_calls import adapted_optimizer
from engines.megatron.weights.parameters import HeldParameter, Part


@dataclass(frozen=True, eq=False)
class SteppedByGroup(Stepped):
    """A master of Transformer Engine's or apex's FusedAdam, which count steps in the parameter group, as an integer."""

    group: dict[str, Any]
    read: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float32))
    """Value that a checkpoint writes and reads as `step`."""

    def ensure_state(self) -> dict[str, Tensor]:
        """See `Stepped`. Neither of these optimizers makes moments where there are some."""
        if not self.state:
            self.state.update({name: torch.zeros_like(self.master.detach()) for name in MOMENTS})
        self.read.fill_(self.group.get("step", 0))
        return {name: self.state[name] for name in MOMENTS} | {"step": self.read}

    @property
    def steps(self) -> float:
        """See `Stepped`."""
        return float(self.read)

    def go_on(self, steps: float) -> None:
        """See `Stepped`."""
        self.group["step"] = int(steps)


class CoreUpdates(Updates):
    """Updates by megatron-core's own optimizer."""

    def __init__(
        self, config: EngineConfig, chunks: Sequence[Any], parameters: Sequence[HeldParameter], world: dist.ProcessGroup
    ) -> None:
        """Make it; see `Updates`. Collective. RuntimeError where its tensors are not those of the weight map."""
        super().__init__(config, chunks, parameters, world)
        dtype = chunks[0].config.params_dtype
        with adapted_optimizer(next(chunks[0].parameters()).device):
            self.core: Any = _made(config, chunks, dtype)
        self.inner = [one.optimizer for one in self.core.chained_optimizers if one.optimizer is not None]
        for optimizer in self.inner:
            _set_up(optimizer)
        masters = {one.flat.data_ptr(): one for one in self._masters()}
        self.stepped = tuple(_of(part, masters) for part in self.parts)
        if len(masters) != len(self.parts):
            raise RuntimeError(f"megatron-core's optimizer updates {len(masters)} tensors, of {len(self.parts)} parts")

    def _masters(self) -> Iterator[Stepped]:
        for optimizer in self.inner:
            for group in optimizer.param_groups:
                for master in group["params"]:
                    own = isinstance(optimizer, torch.optim.Adam)
                    yield Stepped(master, optimizer) if own else SteppedByGroup(master, optimizer, group)

    def _update(self, lr: float, adam: EngineConfig) -> None:
        for optimizer in self.inner:
            set_adam(optimizer, lr, adam)
        self.core.prepare_grads()
        self.core.step_with_ready_grads()  # which copies masters to parameters, and gathers those of other ranks
        self.core.zero_grad()

    def __str__(self) -> str:
        """Return the optimizers' names for logs."""
        outer = {type(one).__name__: None for one in self.core.chained_optimizers}
        inner = {name_of(one): None for one in self.inner}
        return f"megatron-core's {' and '.join(outer)} over {' and '.join(inner) or 'nothing'}"


def _made(config: EngineConfig, chunks: Sequence[Any], dtype: torch.dtype) -> Any:
    vectors = ParamKey(predicate=ParamPredicate("vectors", lambda parameter: parameter.ndim < 2))
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=config.eps,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.distributed_optimizer,
            clip_grad=0.0,
        ),
        list(chunks),
        config_overrides={vectors: {"wd_mult": 0.0}},
        use_gloo_process_groups=False,  # for its own files
    )


def _set_up(optimizer: torch.optim.Optimizer) -> None:
    """Mark the groups that decay, as megatron-core's scheduler would, and let torch's AdamW run in one kernel."""
    groups = optimizer.param_groups
    groups[:] = [group for group in groups if group["params"]]  # apex looks for the first parameter of each
    for group in groups:
        group[DECAYS] = group["wd_mult"]
        if isinstance(optimizer, torch.optim.Adam):
            group["fused"], group["foreach"] = True, False


def _of(part: Part, masters: dict[int, Stepped]) -> Stepped:
    """Return the master of a part: megatron-core's copy where there is one, else the parameter's own memory."""
    copied = getattr(part.one.parameter, "main_param", None)
    one = masters.get((part.values if copied is None else copied).data_ptr())
    if one is None or one.flat.numel() != part.stop - part.start:
        raise RuntimeError(f"megatron-core's optimizer does not update {part.one.held.name} from {part.start} on")
    return one
