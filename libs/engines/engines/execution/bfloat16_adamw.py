"""AdamW whose moments are kept in bfloat16: 4 bytes a parameter in place of 8.

The update is torch's AdamW (Loshchilov and Hutter 2019, algorithm 2) in the weight's dtype, float32 as a rule: moments
are widened, updated, used, and only then rounded to bfloat16 (to nearest, 2^-9 relative). What a step uses is therefore
exact but for the rounding of what came before. A second moment follows the gradient as long as 1 - beta2 is well above
2^-9 = 0.002: with 0.98 a change of a tenth moves it; far above, it would stand still, and `EngineConfig` refuses that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class BFloat16AdamW(torch.optim.AdamW):
    """See the module's text. `grad_scale` and `found_inf` are as of torch's fused AdamW: scalars on the device."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        self.register_load_state_dict_post_hook(_narrow)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient; none where `found_inf` is 1."""
        assert closure is None, "the gradient is there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self._state(parameter), group)

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        return state

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one weight; its temporaries are freed before the next one's."""
        weight, grad = _local(parameter), _local(parameter.grad)
        first, second = _local(state["exp_avg"]), _local(state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        if self.grad_scale is not None:
            grad = grad / self.grad_scale.to(grad.dtype)
        count = state["step"] + 1
        mean = first.to(weight.dtype, copy=True).lerp_(grad, 1 - beta1)
        square = second.to(weight.dtype, copy=True).mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (group["lr"] / (1 - beta1**count)).to(weight.dtype)
        below = (square / (1 - beta2**count).to(weight.dtype)).sqrt_().add_(group["eps"])
        moved = weight * (1 - group["lr"] * group["weight_decay"]) - scale * mean / below
        updates = ((weight, moved), (first, mean), (second, square), (state["step"], count))
        for old, new in updates:
            if self.found_inf is not None:
                new = torch.where(self.found_inf.bool(), old.to(new.dtype), new)
            old.copy_(new)


def _narrow(optimizer: torch.optim.Optimizer) -> None:
    """Cast loaded moments back to bfloat16: torch casts what it loads to the weights' dtype. No bit changes."""
    for state in optimizer.state.values():
        for name in state.keys() - {"step"}:
            state[name] = state[name].to(torch.bfloat16)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
