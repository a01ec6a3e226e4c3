"""A sampler's end of a pool's group: it joins on a call, and receives the bucket that a call announces, or what ranks
send by a plan."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch

from rollout.sync.pieces import Bucket
from rollout.sync.transfer import Receiver
from rollout.workers.bucket_messages import bucket_from
from rollout.workers.collective import Backend, BrokenGroup, Rendezvous, WeightGroup, join, waited
from rollout.workers.shard_rendezvous import exchange

MARK = "broadcast"
"""Key of a call whose bucket is broadcast."""


class GroupBuckets:
    """The buckets of a sender's broadcasts, or of ranks that send their shards; none before `join`."""

    def __init__(self) -> None:
        self._group: WeightGroup | None = None

    async def join(self, call: Mapping[str, Any]) -> None:
        """Join the sender and the other samplers. Raise BrokenGroup where not all of them come."""
        rendezvous = Rendezvous.read(call["rendezvous"])
        if self._group is not None:
            self._group.abort()
        device, secret = device_for(rendezvous.backend), bytes.fromhex(call.get("secret", ""))
        joined = waited(lambda: join(rendezvous, int(call["rank"]), call["host"], device, secret), "weights: join")
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
        group, nbytes = self._joined(), int(call["bytes"])
        return bucket_from(call, await asyncio.wrap_future(waited(lambda: group.take(nbytes), "weights: take")))

    async def exchange(self, call: Mapping[str, Any], engine: Receiver) -> int:
        """Give an engine what the ranks of the group send it; return the number of missing elements.

        Raises:
            ValueError: a bucket is not what the plan says, or the engine refused one.
            BrokenGroup: one did not come.
        """
        group, most = self._joined(), int(call["max_bytes"])
        _, stream = await asyncio.wrap_future(waited(lambda: exchange(group, (), True, most), "weights: plan"))
        missing, problem = -1, None
        while (bucket := await asyncio.wrap_future(waited(lambda: next(stream, None), "weights: take"))) is not None:
            if problem is not None:
                continue  # all rounds are obeyed: the ranks wait for this process
            try:
                missing = await engine.receive(bucket)
            except ValueError as error:
                problem = error
        if problem is not None:
            raise problem
        return missing

    def _joined(self) -> WeightGroup:
        if self._group is None:
            raise BrokenGroup("weights are sent to a sampler that joined no group")
        return self._group


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
