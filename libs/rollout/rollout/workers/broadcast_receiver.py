"""A sampler's end of a pool's broadcasts: it joins on a call, and receives the bucket that a call announces."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from rollout.sync.pieces import Bucket
from rollout.workers.bucket_messages import bucket_from
from rollout.workers.collective import Backend, BrokenGroup, Rendezvous, WeightGroup, join, waited

MARK = "broadcast"
"""Key of a call whose bucket is broadcast."""


class GroupBuckets:
    """The buckets of a sender's broadcasts; none before `join`."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    async def join(self, call: Mapping[str, Any]) -> None:
        """Join the sender and the other samplers. Raise BrokenGroup where not all of them come."""
        rendezvous = Rendezvous.read(call["rendezvous"])
        if self._group is not None:
            self._group.abort()
        device = device_for(rendezvous.backend)
        joined = waited(lambda: join(rendezvous, int(call["rank"]), call["host"], device), "weights: join")
        self._group = await asyncio.wrap_future(joined)

    def is_broadcast(self, call: Mapping[str, Any]) -> bool:
        """Return whether a call's bucket is broadcast."""
        return MARK in call

    async def take(self, call: Mapping[str, Any]) -> Bucket:
        """Receive the bucket of a call, on the group's device.

        Raises:
            ValueError: its bytes are not those that were sent.
            BrokenGroup: it did not come.
        """
        group = self._group
        if group is None:
            raise BrokenGroup("weights are broadcast to a sampler that joined no group")
        nbytes = int(call["bytes"])
        return bucket_from(call, await asyncio.wrap_future(waited(lambda: group.take(nbytes), "weights: take")))


def device_for(backend: Backend) -> torch.device | None:
    """Return this process's own device, where the backend passes weights between devices.

    Raises:
        ValueError: it has none.
    """
    if backend != "nccl":
        return None
    if not torch.cuda.is_available():
        raise ValueError("NCCL passes weights between CUDA devices, and this process sees none")
    return torch.device("cuda", torch.cuda.current_device())
