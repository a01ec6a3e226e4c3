"""Nine checks that tell a device of its own from another name for the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def canary(
    device: str, synchronize: Callable[[], Any], calls: Callable[[], int], allocated: Callable[[], int]
) -> dict[str, bool]:
    """Return, by name of each check, whether `device` passes it."""
    counted, before = calls(), allocated()
    there, here = torch.ones(1024, device=device), torch.ones(1024)
    late = (there * 2).to("cpu", non_blocking=True)
    early = bool(late.isnan().all())
    synchronize()
    other = torch.ones(1024, device=f"{device}:1" if device != "cpu" else "cpu")
    return {
        "tensors are there": there.device.type == "npu",
        "storages are there": there.untyped_storage().device.type == "npu",
        "no numpy view": raises(TypeError, lambda: np.asarray(there)),
        "not mixed with the host": raises(RuntimeError, lambda: there + here),
        "not mixed with another": raises(RuntimeError, lambda: there + other),
        "generators of its own": raises(
            RuntimeError, lambda: torch.rand(2, device=device, generator=torch.Generator())
        ),
        "copies arrive late": early and bool((late == 2).all()),
        "operators are counted": calls() > counted,
        "memory is counted": allocated() >= before + there.nbytes,
    }


def raises(kind: type[BaseException], call: Callable[[], Any]) -> bool:
    """Return whether a call raises an error of this kind."""
    try:
        call()
    except kind:
        return True
    return False
