"""Collectives of plain data (`seqpack.comm.plain`): the values of all ranks, or of one, on each of them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from seqpack.comm.plain import decode_plain, encode_plain

Group = dist.ProcessGroup | None


def gather_plain(value: Any, group: Group = None, kinds: Sequence[type] = ()) -> list[Any]:
    """Return the values of all ranks of a group, in order of rank; collective. `kinds`: dataclasses that they hold."""
    return [decode_plain(data, kinds) for data in gather_bytes(encode_plain(value), group)]


def broadcast_plain(value: Any, src: int = 0, group: Group = None, kinds: Sequence[type] = ()) -> Any:
    """Return the value of rank `src` (of all ranks) on every rank of a group; collective. `src` need not wait."""
    return decode_plain(broadcast_bytes(encode_plain(value) if dist.get_rank() == src else b"", src, group), kinds)


def gather_bytes(data: bytes, group: Group = None) -> list[bytes]:
    """Return the bytes of all ranks of a group, in order of rank; collective.

    Each rank fills its part of one buffer, and the parts are added: ranks that have nothing cost nothing.
    """
    rank, device = dist.get_rank(group), host_or_device(group)
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    sizes[rank] = len(data)
    sizes = sizes.to(device)
    dist.all_reduce(sizes, group=group)
    every = sizes.tolist()
    flat = torch.zeros(sum(every), dtype=torch.uint8)
    begin = sum(every[:rank])
    flat[begin : begin + len(data)] = _tensor(data)
    flat = flat.to(device)
    if len(flat):
        dist.all_reduce(flat, group=group)
    return [part.cpu().numpy().tobytes() for part in flat.split(every)]


def broadcast_bytes(data: bytes, src: int = 0, group: Group = None) -> bytes:
    """Return the bytes of rank `src` (of all ranks) on every rank of a group; collective."""
    device = host_or_device(group)
    size = torch.tensor([len(data)]).to(device)
    dist.broadcast(size, src=src, group=group)
    count = int(size)
    flat = (_tensor(data) if dist.get_rank() == src else torch.empty(count, dtype=torch.uint8)).to(device)
    if count:
        dist.broadcast(flat, src=src, group=group)
    return flat.cpu().numpy().tobytes()


def host_or_device(group: Group = None) -> torch.device:
    """Return where a group takes tensors from: the host, or a device where it has a backend of that alone."""
    if "cpu:" in str(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
