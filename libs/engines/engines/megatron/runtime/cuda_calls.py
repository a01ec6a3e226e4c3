"""megatron-core 0.16 and 0.19 on devices that are not CUDA's: what of it asks for CUDA by name, answered by the device.

megatron-core places tensors on `torch.cuda.current_device()` and copies on CUDA's streams, whatever the model is on. On
a CPU and on NPUs each of our calls into it runs inside `adapted(device)`, an adaptation
(`engines.devices.adaptations`): for the versions that it was written for, with a name that is gone told before anything
is changed, and put back at the end. On a GPU nothing is touched.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import optimizer
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import mappings
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from engines.devices.adaptations import Adaptation, Patch, applied
from engines.devices.detect import devices_of
from engines.private_api import DISPATCHER_TO_HOST, MAPPINGS_GATHER, MAPPINGS_REDUCE_SCATTER

VERSIONS = ">=0.16,<0.20,!=0.17.*,!=0.18.*"


class _TorchOn(ModuleType):
    """A stand-in for torch in `schedules`, which counts tokens in a tensor on device="cuda", and in `optimizer`, whose
    scale lies there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("torch")
        self._there = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, *size: Any, **options: Any) -> Tensor:
        """Return torch.zeros on the device."""
        return torch.zeros(*size, **{**options, "device": self._there})

    def tensor(self, data: Any, **options: Any) -> Tensor:
        """Return torch.tensor on the device."""
        return torch.tensor(data, **{**options, "device": self._there})


class _NoStream:
    """A stand-in for a stream of copies to the host, which are waited for at once."""


ON_HOST = ("num_out_tokens", "num_global_tokens_per_local_expert")
SPLITS = ("input_splits", "output_splits", "output_splits_tp")


def _to_the_host(dispatcher: Any, point: str, tokens_per_expert: Tensor | None = None) -> Tensor | None:
    """Copy the sizes of an all-to-all to the host and wait; megatron-core itself does so on CUDA devices alone."""
    if point != dispatcher.cuda_dtoh_point:
        return tokens_per_expert
    for name in (*ON_HOST, *SPLITS):
        value = getattr(dispatcher, name, None)  # one expert a rank: it has no counts of several
        if isinstance(value, Tensor):
            setattr(dispatcher, name, value.cpu().numpy() if name in SPLITS else value.cpu())
    return None if tokens_per_expert is None else tokens_per_expert.cpu()


_GATHER, _REDUCE_SCATTER = getattr(mappings, MAPPINGS_GATHER), getattr(mappings, MAPPINGS_REDUCE_SCATTER)


def _gather_of_one_size(
    x: Tensor, group: dist.ProcessGroup, output_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """Gather parts of different sizes along dimension 0, padded: gloo takes one size alone, HCCL is untested."""
    if output_split_sizes is None or group.size() == 1:
        gathered: Tensor = _GATHER(x, group, output_split_sizes, use_global_buffer)
        return gathered
    most = max(output_split_sizes)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in output_split_sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _reduce_scatter_of_one_size(
    x: Tensor, group: dist.ProcessGroup, input_split_sizes: list[int] | None = None, use_global_buffer: bool = False
) -> Tensor:
    """Sum over the group and keep this rank's part, whose size is its own, by an all-reduce of the whole."""
    if input_split_sizes is None or group.size() == 1:
        scattered: Tensor = _REDUCE_SCATTER(x, group, input_split_sizes, use_global_buffer)
        return scattered
    whole = x.clone()
    dist.all_reduce(whole, group=group)
    result: Tensor = whole.split(input_split_sizes)[group.rank()].clone()
    return result


_TYPE = Tensor.type


def _type_of_cudas(tensor: Tensor, *given: Any, **options: Any) -> Any:
    """Return `tensor.type()` as on a GPU: optimizers choose by this name whether a parameter needs a float32 master."""
    name = _TYPE(tensor, *given, **options)
    return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name


@cache
def optimizer_adaptation_to(device: torch.device) -> Adaptation:
    """Return the changes to megatron-core's optimizers while they are made for a device other than CUDA."""

    def patches() -> list[Patch]:
        return [Patch(optimizer, "torch", _TorchOn(device)), Patch(Tensor, "type", _type_of_cudas)]

    return Adaptation(f"megatron-core's optimizers on {device}", "megatron-core", VERSIONS, patches)


def adapted_optimizer(device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager in which megatron-core's optimizers can be made for `device`; see `adapted`."""
    return nullcontext() if device.type == "cuda" else applied(optimizer_adaptation_to(device))


@cache
def adaptation_to(device: torch.device) -> Adaptation:
    """Return the changes to megatron-core for a device other than CUDA."""
    overlaps = devices_of(device).overlaps
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731

    def patches() -> list[Patch]:
        wait = torch.get_device_module(device).synchronize if overlaps else nothing
        return [
            Patch(torch.cuda, "current_device", lambda: device),
            Patch(torch.cuda, "synchronize", wait),
            Patch(torch.cuda, "current_stream", lambda *_: _NoStream()),
            Patch(schedules, "torch", _TorchOn(device)),
            Patch(mappings, MAPPINGS_GATHER, _gather_of_one_size),
            Patch(mappings, MAPPINGS_REDUCE_SCATTER, _reduce_scatter_of_one_size),
            Patch(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", _NoStream()),
            Patch(MoEAlltoAllTokenDispatcher, DISPATCHER_TO_HOST, _to_the_host),
        ]

    return Adaptation(f"megatron-core on {device}", "megatron-core", VERSIONS, patches)


@contextmanager
def adapted(device: torch.device) -> Iterator[None]:
    """Run calls into megatron-core for a model on `device` inside the block; what is replaced is restored at the end.

    Its small functions are not compiled there: torch's compiler has no code for an NPU, and on a CPU each process would
    run a C++ compiler for seconds before its first step, which models small enough for a CPU do not earn back.
    ValueError for a megatron-core of another version, or one that lacks a name.
    """
    if device.type == "cuda":
        yield
        return
    with applied(adaptation_to(device)), torch.compiler.set_stance("force_eager"):
        yield
