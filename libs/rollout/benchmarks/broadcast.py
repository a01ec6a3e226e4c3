"""What the weights of a pool of Ray samplers cost on one machine: through Ray's object store, and broadcast.

    PYTHONPATH=libs/seqpack:libs/chat_tools:libs/rollout python libs/rollout/benchmarks/broadcast.py \
        [--transports objects gloo nccl] [--workers 1 2] [--mib 512] [--times 5]

Weights of so many MiB in buckets of 64 go to each sampler, which lays them into memory of its own where they come
(a device's, where `nccl` is among the transports: the sender's weights are on the first device then, in every row).
Prints a JSON line for each number of samplers and each transport: seconds of a hand-over, its bytes a second over all
samplers, the least and the median of those after the first, which makes the group.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from typing import Any, Literal

import torch

from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, BucketPiece, buckets
from rollout.sync.transfer import transfer_weights
from rollout.workers.placement import Demand
from rollout.workers.ray_local import local_ray
from rollout.workers.ray_pool import RayPool
from rollout.workers.serve import Handler, weight_handlers

BUCKET_BYTES = 1 << 26
NAME = "weights"


class Memory:
    """A receiver that keeps what it is given, and knows no model."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._place = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._missing = nbytes

    async def prepare(self, manifest: Manifest) -> None:
        """Begin anew."""
        del manifest
        self._missing = self._place.numel()

    async def receive(self, bucket: Bucket) -> int:
        """Lay it into its place."""
        for piece in bucket.pieces():
            self._place[piece.offset : piece.offset + piece.flat.numel()].copy_(piece.flat)
            self._missing -= piece.flat.numel()
        return self._missing

    async def commit(self, version: int) -> None:
        """Nothing is in use."""
        del version

    async def abort(self) -> None:
        """Nothing is in use."""

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Nothing runs."""
        del mode

    async def resume(self) -> None:
        """Nothing waited."""


def receiving(nbytes: int, device: str) -> dict[str, Handler]:
    """Return in the actor."""
    memory: Any = Memory(nbytes, device)
    return weight_handlers(memory)


def measure(transport: Any, workers: int, mib: int, times: int, on_device: bool) -> dict[str, Any]:
    """Return one row."""
    device = "cuda:0" if on_device else "cpu"
    nbytes = mib << 20
    flat = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    step = BUCKET_BYTES // 4
    pieces = [BucketPiece(NAME, (nbytes,), torch.uint8, at, flat[at : at + step]) for at in range(0, nbytes, step)]
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    demand = Demand(workers, cpus=0.5, gpus=1.0 if on_device else 0.0)
    pool = RayPool(receiving, (nbytes, device), demand, environment=paths, transport=transport)
    took = []
    try:
        pool.ready.result(120)
        for version in range(1, times + 2):
            begun = time.perf_counter()
            asyncio.run(transfer_weights([pool], Manifest(version), buckets(pieces, BUCKET_BYTES)))
            took.append(time.perf_counter() - begun)
    finally:
        pool.close()
    least, middle = min(took[1:]), statistics.median(took[1:])
    return {
        "transport": transport,
        "samplers": workers,
        "MiB": mib,
        "first_s": round(took[0], 3),
        "least_s": round(least, 3),
        "median_s": round(middle, 3),
        "GB_per_s_to_each": round(nbytes / middle / 1e9, 2),
    }


def main() -> None:
    """Every row that was asked for, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["objects", "gloo"], choices=["objects", "gloo", "nccl"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    on_device = "nccl" in asked.transports
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if on_device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[1:])  # of the samplers: the first one is the sender's
    with local_ray(cpus=max(asked.workers)):
        if on_device:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        for workers in asked.workers:
            for transport in asked.transports:
                print(json.dumps(measure(transport, workers, asked.mib, asked.times, on_device)), flush=True)


if __name__ == "__main__":
    main()
