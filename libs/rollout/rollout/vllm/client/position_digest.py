"""A digest of rotary positions, by which an engine and vLLM compare theirs."""

import hashlib

import torch
from torch import Tensor


def digest_of(positions: Tensor) -> str:
    """Return the hex digest of positions i64[3, tokens]."""
    return hashlib.blake2b(positions.to(torch.int64).contiguous().numpy().tobytes(), digest_size=16).hexdigest()
