"""Media of a stream as JSON: tensors by dtype, shape and bytes, exact to the bit, and never a pickle."""

import base64
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def plain_media(media: Mapping[str, Any]) -> dict[str, Any]:
    """Convert tensors and lists of whole numbers to JSON values, by key. Raise ValueError for other values."""
    return {key: _plain(key, value) for key, value in media.items()}


def read_media(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Read the result of `plain_media`, tensors on the CPU. Raise ValueError where bytes do not fit a shape."""
    return {key: _tensor(value) if isinstance(value, dict) else value for key, value in plain.items()}


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, list | tuple) and all(type(number) is int for number in value):
        return list(value)
    name = str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__
    if not isinstance(value, Tensor) or name not in DTYPES:
        raise ValueError(
            f"media {key!r} are a {name}: they are lists of whole numbers, or tensors of {', '.join(DTYPES)}"
        )
    data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {"dtype": name, "shape": list(value.shape), "data": base64.b64encode(data).decode()}


def _tensor(plain: Mapping[str, Any]) -> Tensor:
    dtype, shape = DTYPES[plain["dtype"]], plain["shape"]
    data = base64.b64decode(plain["data"], validate=True)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {plain['dtype']} of shape {shape}")
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.zeros(0, dtype=dtype)
    return flat.reshape(shape)
