"""Buckets of weights through shared memory, or with the message itself; each has a checksum.

A bucket in host memory has the CRC of its bytes, one on a device the digest that a device is fast at
(`rollout.sync.tensor_digest`).
"""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from torch import Tensor

from rollout.sync.adapter import Adapter
from rollout.sync.boxes import Box
from rollout.sync.manifest import Manifest, TensorSpec
from rollout.sync.pieces import Bucket, Header
from rollout.sync.tensor_digest import digest_of

DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8)
}


class SharedBuckets:
    """The sender's memory: a segment that holds one bucket at a time, and grows with them."""

    def __init__(self) -> None:
        self._segment: SharedMemory | None = None

    def put(self, bucket: Bucket) -> dict[str, Any]:
        """Copy a bucket into the segment; return the message with its place. It must be taken before the next one."""
        data = plain_bytes(bucket)
        if self._segment is None or self._segment.size < data.numel():
            self.close()
            self._segment = SharedMemory(create=True, size=max(1, data.numel()))
        assert self._segment.buf is not None
        place = self._segment.buf[: data.numel()]
        place[:] = data.numpy().data
        place.release()
        return {"segment": self._segment.name, **bucket_message(bucket, data)}

    def close(self) -> None:
        """Free the memory."""
        if self._segment is not None:
            self._segment.close()
            self._segment.unlink()
        self._segment = None


class TakenBuckets:
    """The receiver's view of the segment."""

    def __init__(self) -> None:
        self._segment: SharedMemory | None = None

    def take(self, message: Mapping[str, Any]) -> Bucket:
        """Copy the bucket of a message out. Raise ValueError where its bytes are not those that were sent."""
        if "data" in message:
            return bucket_from(message, _tensor(bytearray(message["data"])))
        if self._segment is None or self._segment.name != message["segment"]:
            self.close()
            self._segment = SharedMemory(name=message["segment"])
        assert self._segment.buf is not None
        return bucket_from(message, _tensor(bytearray(self._segment.buf[: message["bytes"]])))

    def close(self) -> None:
        """Close the segment, which is the sender's."""
        if self._segment is not None:
            self._segment.close()
        self._segment = None


def plain_bytes(bucket: Bucket) -> Tensor:
    """Return the bytes of a bucket in host memory, uint8."""
    return bucket.buffer.detach().cpu().contiguous()


def bucket_message(bucket: Bucket, data: Tensor) -> dict[str, Any]:
    """Return the headers of a bucket with these bytes, uint8, and their checksum."""
    headers = [
        [h.name, list(h.shape), _name(h.dtype), h.offset, h.numel, h.start, None if h.box is None else astuple(h.box)]
        for h in bucket.headers
    ]
    kind = "crc" if data.device.type == "cpu" else "digest"
    return {"bytes": data.numel(), kind: CHECKSUMS[kind](data), "headers": headers}


def bucket_from(message: Mapping[str, Any], data: Tensor) -> Bucket:
    """Return the bucket of a message with the bytes `data`, uint8. Raise ValueError where they are not those sent."""
    kind = next(kind for kind in CHECKSUMS if kind in message)
    if data.numel() != message["bytes"] or CHECKSUMS[kind](data) != message[kind]:
        raise ValueError("a bucket of weights came damaged: its checksum differs")
    headers = tuple(
        Header(name, tuple(shape), DTYPES[dtype], offset, numel, start, None if box is None else Box(*map(tuple, box)))
        for name, shape, dtype, offset, numel, start, box in message["headers"]
    )
    return Bucket(headers, data)


def _crc(data: Tensor) -> int:
    return zlib.crc32(data.cpu().numpy().data)


def _tensor(data: bytearray) -> Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


CHECKSUMS: Mapping[str, Callable[[Tensor], int]] = {"crc": _crc, "digest": digest_of}
"""Checksums by their names on the wire."""


def manifest_message(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON."""
    tensors = manifest.tensors
    named = None if tensors is None else [[t.name, list(t.shape), _name(t.dtype)] for t in tensors]
    adapter = None if manifest.adapter is None else asdict(manifest.adapter)
    return {"version": manifest.version, "checksum": manifest.checksum, "tensors": named, "adapter": adapter}


def manifest_from(message: Mapping[str, Any]) -> Manifest:
    """Return the manifest of a message."""
    named = message["tensors"]
    tensors = None if named is None else tuple(TensorSpec(n, tuple(shape), DTYPES[kind]) for n, shape, kind in named)
    fields = message["adapter"]
    adapter = None if fields is None else Adapter(fields["rank"], fields["scale"], tuple(fields["layers"]))
    return Manifest(int(message["version"]), tensors, message["checksum"], adapter)


def _name(dtype: torch.dtype) -> str:
    if str(dtype) not in DTYPES:
        raise ValueError(f"weights of {dtype} have no name on the wire yet: add it to DTYPES")
    return str(dtype)
