"""A digest of a tensor's bytes, as fast as memory is read: both ends of a weight sync compute it."""

import zlib

import torch
from torch import Tensor

_COLUMNS = 1024


def digest_of(tensor: Tensor) -> int:
    """Return the digest of a contiguous tensor on any device: the CRC of the sums of its 8-byte words, column by column
    of rows of 8 KiB, and of the remaining bytes. Blind to whole rows that change places, as `receive` checks places
    itself."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    whole = data.numel() // (8 * _COLUMNS) * (8 * _COLUMNS)
    crc = zlib.crc32(data[whole:].cpu().numpy().data)
    if whole:
        crc = zlib.crc32(data[:whole].view(torch.int64).view(-1, _COLUMNS).sum(0).cpu().numpy().data, crc)
    return crc
