"""Private names of torch that dyncp uses, all of them: what a new version may break is here."""

from datetime import timedelta

import torch
import torch.distributed as dist

assert_async = torch._assert_async
"""Device assertion that the host does not wait for."""
flash_attention_forward = torch.ops.aten._flash_attention_forward
flash_attention_backward = torch.ops.aten._flash_attention_backward


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout of a group's collectives on this kind of device."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout
