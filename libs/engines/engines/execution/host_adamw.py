"""AdamW whose moments are kept in host memory, 8 bytes a parameter that the device is free of; weights may be too.

The update is torch's own fused one on the device, bit for bit: 1. the moments of one parameter come to its shard, from
pinned memory where the device has that; 2. they are updated with it; 3. they go back, and the next parameter's come.

Invariants: between two steps no moment is on the device; within one, those of a parameter or two. All copies are on the
current stream, so that a read follows the write before it; who reads the moments on the host waits for that stream.
Per step 8 bytes a parameter travel each way (ZeRO-Offload, Ren et al., arXiv 2101.06840, steps on the host instead:
4 bytes each way, and the host's own AdamW). Weights and gradients that are kept on the host (FSDP2's
`CPUOffloadPolicy`) come with them: 16 bytes there, 12 back.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from engines.devices.detect import devices_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostAdamW(torch.optim.AdamW):
    """See the module's text. `grad_scale` and `found_inf` are as of torch's fused AdamW: scalars on the device."""

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        self.register_load_state_dict_post_hook(_to_host)
        self.register_state_dict_pre_hook(_wait)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every weight that has a gradient; none where `found_inf` is 1."""
        assert closure is None, "the gradient is there already"
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, self._state(parameter), group)
        if any(p.device != _device(p) for group in self.param_groups for p in group["params"]):
            _wait(self)  # who reads weights on the host finds them there

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=_device(parameter))
            state |= {name: on_host(parameter) for name in MOMENTS}
        return state

    def _update(self, parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        """Update one weight; its copies on the device are freed before the next one's."""
        device, pins = _device(parameter), _pins(parameter)
        sources = [_local(parameter), *(_local(state[name]) for name in MOMENTS)]
        weight, *moments = near = [one.to(device, non_blocking=pins) for one in sources]
        adamw(
            [weight],
            [_local(parameter.grad).to(device, non_blocking=pins)],
            [moments[0]],
            [moments[1]],
            max_exp_avg_sqs=[],
            state_steps=[state["step"]],
            fused=True,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            amsgrad=False,
            maximize=False,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
        )
        for there, here in zip(sources, near, strict=True):
            if there is not here:
                there.copy_(here, non_blocking=pins)


def _wait(optimizer: torch.optim.Optimizer) -> None:
    """Wait for moments that are being copied to the host."""
    pinned = next((_device(parameter) for parameter in optimizer.state if _pins(parameter)), None)
    if pinned is not None:
        devices_of(pinned).current_stream().synchronize()


def _to_host(optimizer: torch.optim.Optimizer) -> None:
    """Move loaded moments to the host, and `step` to the device: torch loads both to where the weights are."""
    for parameter, state in optimizer.state.items():
        state["step"] = state["step"].to(_device(parameter))
        for name in state.keys() - {"step"}:
            moment = on_host(parameter)
            _local(moment).copy_(_local(state[name]))
            state[name] = moment


def on_host(parameter: Tensor) -> Tensor:
    """Return zeros like a parameter in host memory."""
    return torch.zeros_like(parameter, device="cpu", pin_memory=_pins(parameter))


def _device(parameter: Tensor) -> torch.device:
    """Return the device that a parameter is computed on; the parameter itself may lie in host memory."""
    if isinstance(parameter, DTensor):
        return devices_of(parameter.device_mesh.device_type).current()
    return parameter.device


def _pins(parameter: Tensor) -> bool:
    """Return whether host memory is pinned: only copies of pinned memory need not be waited for."""
    return _device(parameter).type == "cuda"


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
