"""A digest of a tensor's bytes, as fast as memory is read: both ends of a weight sync compute it."""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_COLUMNS = 1024


def digest_of(tensor: Tensor) -> int:
    """Return the digest of a contiguous tensor on any device: the CRC of the sums of its 8-byte words, column by column
    of rows of 8 KiB, and of the remaining bytes. Blind to whole rows that change places, as `receive` checks places
    itself."""
    return digests_of([tensor])[0]


def digests_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the digest of each contiguous tensor of one device, which the host waits for once: waiting for each costs
    more than the sums, while a sampler stands still."""
    if not tensors:
        return []
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    ends = [data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS) for data in flat]
    rests = _on_host([data[end:] for data, end in zip(flat, ends, strict=True)])
    rows = [data[:end].view(torch.int64).view(-1, _COLUMNS) for data, end in zip(flat, ends, strict=True) if end]
    sums = iter(_on_host([one.sum(0) for one in rows]))
    crcs = (zlib.crc32(rest.numpy().data) for rest in rests)
    return [zlib.crc32(next(sums).numpy().data, crc) if end else crc for crc, end in zip(crcs, ends, strict=True)]


def _on_host(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors on the host by one copy."""
    if len(parts) < 2:
        return [part.cpu() for part in parts]
    near: Sequence[Tensor] = torch.cat(list(parts)).cpu().split([part.numel() for part in parts])
    return near
