"""The buckets of a weight sync whose ranks send their own shards to the ranks that have a sampler, or to a pool's.

Where all ranks compute on CUDA devices of one host and their samplers are vLLM's, nothing is sent: each rank lays its
shards out on its device, and vLLM's workers read what is theirs by CUDA IPC (`rollout.vllm.weights.parts`).
"""

import json
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rollout.errors import NotFiniteError
from rollout.sync.parallel_boxes import WorkerLayout
from rollout.sync.pieces import Bucket
from rollout.vllm.weights import cuda_memory
from rollout.vllm.weights.parts import PartRegions, PartsBucket, PartsPlan, plan_parts
from rollout.workers.authentication import authenticate, run_secret
from rollout.workers.collective import BrokenGroup, Rendezvous
from rollout.workers.pool_shards import PoolShards, RankEnd
from rollout.workers.process import WorkerDied
from rollout.workers.shard_exchange import (
    HeldShard,
    ShardExchange,
    ShardGroup,
    ShardMetadata,
    describe,
    plan_of_metadata,
    read_metadata,
    reader_of,
)
from rollout.workers.shard_rendezvous import rendezvous_secret


def shard_buckets(held: Iterable[HeldShard], sampler: Any, version: int, max_bytes: int) -> Iterator[Bucket]:
    """Send this rank's shards by the plan that all ranks make, and yield what its own sampler gets; collective.

    A rank whose sampler is another one's (`RemoteSampler.takes_weights`) gets one empty bucket. Where the first rank's
    samplers are a pool that takes shards (`RayPool.shards`), every rank sends its own to them. The ranks authenticate
    first, by the run's secret.

    Raises:
        ValueError: there is no secret, or a bucket is not what the plan says.
        AuthenticationError: a rank does not know it.
        BrokenGroup: one of the pool was lost; on every rank, and the pool is dead.
    """
    group = ShardGroup(dist.group.WORLD, _device())
    shards, wants = list(held), getattr(sampler, "takes_weights", True)
    key = authenticate(group.exchange, group.rank, run_secret())
    pool: PoolShards | None = getattr(sampler, "shards", None)
    if (told := _invitation(group, pool)) is not None:
        yield _sent_to_pool(group, pool, told, shards, max_bytes)
        return
    layout = getattr(sampler, "part_layout", None) if wants else None
    more = {"layout": layout and asdict(layout), "device": _device_of_host(group.device)}
    metadata = read_metadata(tuple(group.gather(describe(shards, wants, **more))))
    parts = parts_of_metadata(metadata)
    if parts is None:
        yield from ShardExchange(plan_of_metadata(metadata, max_bytes), group, shards, key).buckets()
    else:
        place = _staged(group, parts, shards, version, sampler.version)
        if wants:
            yield PartsBucket.of(parts.place(group.rank, place))
    if not wants:
        yield _nothing()


def _nothing() -> Bucket:
    return Bucket((), torch.empty(0, dtype=torch.uint8))


def _invitation(group: ShardGroup, pool: PoolShards | None) -> Any:
    """Return what the first rank tells of its pool: where ranks and samplers meet, or why they can't; None without one
    that takes shards. Collective."""
    mine: Any = None
    if pool is not None:
        try:
            mine = pool.open(group.size).message()
        except WorkerDied as error:
            mine = str(error)
            pool.fail(mine)
    return json.loads(group.gather(json.dumps(mine).encode())[0])


def _sent_to_pool(
    group: ShardGroup, pool: PoolShards | None, told: Any, shards: Sequence[HeldShard], max_bytes: int
) -> Bucket:
    """Send this rank's shards to the first rank's pool, and return the bucket of the own sampler; collective.

    All ranks tell each other how it went, so that all of them raise BrokenGroup or none.
    """
    if isinstance(told, str):
        raise BrokenGroup(told)
    rendezvous, bucket, problem = Rendezvous.read(told), _nothing(), None
    secret = rendezvous_secret(run_secret(), rendezvous)
    try:
        if pool is not None:
            bucket = pool.send(shards, secret, max_bytes)
        else:
            _follower(rendezvous, group.rank, secret).send(shards, max_bytes)
    except BrokenGroup as error:
        problem = error
    every = group.gather(b"" if problem is None else str(problem).encode())
    lost = [f"rank {rank}: {one.decode(errors='replace')}" for rank, one in enumerate(every) if one]
    if lost and pool is not None:
        pool.fail(lost[0])
    if lost:
        raise problem or BrokenGroup(lost[0])
    return bucket


@lru_cache(maxsize=1)
def _follower(rendezvous: Rendezvous, rank: int, secret: bytes) -> RankEnd:
    """Return this rank's end of a meeting, which stays while the pool does."""
    return RankEnd.of_follower(rendezvous, rank, secret)


@lru_cache(maxsize=2)
def parts_of_metadata(metadata: ShardMetadata) -> PartsPlan | None:
    """Return the plan of regions for the samplers of one host's ranks; None where weights have to be sent."""
    hosts = {one["device"] for one in metadata.every}
    samplers = {rank: one["layout"] for rank, one in enumerate(metadata.every) if one["wants"]}
    if len(hosts) > 1 or None in hosts or not samplers or not all(samplers.values()):
        return None
    return plan_parts(
        metadata.specs.values(), metadata.held, {rank: WorkerLayout(**one) for rank, one in samplers.items()}
    )


@lru_cache(maxsize=1)
def _regions(plan: PartsPlan, rank: int) -> PartRegions:
    """Return this rank's regions, which stay while the plan does."""
    return PartRegions(plan, rank, cuda_memory.allocate, cuda_memory.path_of)


def _staged(
    group: ShardGroup, plan: PartsPlan, held: Iterable[HeldShard], version: int, in_use: int
) -> dict[int, tuple[str, list[int]]]:
    """Lay this rank's shards out, and return where all ranks have theirs, with digests; collective.

    Raises:
        NotFiniteError: some rank has values that are not finite; on every rank.
    """
    told: list[Any]
    try:
        told = [*_regions(plan, group.rank).stage(reader_of(held), version, in_use), None]
    except NotFiniteError as error:
        told = ["", [], str(error)]
    every = [json.loads(one) for one in group.gather(json.dumps(told).encode())]
    if problem := next((one[2] for one in every if one[2]), None):
        raise NotFiniteError(problem)
    return {rank: (path, digests) for rank, (path, digests, _) in enumerate(every)}


def _device() -> torch.device:
    """Return the device between which the default group passes tensors: the accelerator, unless gloo is its backend."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    backends = dict(one.split(":") for one in dist.get_backend_config().split(","))
    if backends.get(accelerator.type, "gloo") == "gloo":
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _device_of_host(device: torch.device) -> str | None:
    """Return what ranks of one host have in common that compute on CUDA; None on another device."""
    if device.type != "cuda":
        return None
    return f"{socket.gethostname()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
