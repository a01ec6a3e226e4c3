"""Measured seconds of a GiB of weights from the trainer to a sampler, by the way that they take (docs/samplers.md)."""

from typing import NamedTuple


class SyncRate(NamedTuple):
    """Seconds of a GiB of weights, and the way that was measured."""

    seconds: float
    way: str


_GIB = 1.34e9 / 2**30
"""GiB of the weights that were handed over to vLLM."""
RAY = {
    "nccl": SyncRate(0.098, "by nccl, at the rate between two H200 of one host"),
    "objects": SyncRate(2.41, "by objects, at the rate between two H200 of one host"),
    "gloo": SyncRate(2.59, "by gloo, at the rate between two H200 of one host"),
}
"""To Ray's samplers, by transport."""
ON_DEVICE = SyncRate(0.075 / _GIB, "on the device, at the rate into vLLM on one H200")
ON_DEVICE_COPIES = SyncRate(0.124 / _GIB, "on the device, at the rate into 4 replicas of vLLM on one H200")
ON_HOST = SyncRate(0.266 / _GIB, "through host memory, at the rate into vLLM on one H200")
ON_HOST_COPIES = SyncRate(0.373 / _GIB, "through host memory, at the rate into 4 replicas of vLLM on one H200")


def rate_into_vllm(on_device: bool, replicas: int) -> SyncRate:
    """Return the rate to vLLM of this host, whose replicas all read the same weights."""
    if replicas > 1:
        return ON_DEVICE_COPIES if on_device else ON_HOST_COPIES
    return ON_DEVICE if on_device else ON_HOST
