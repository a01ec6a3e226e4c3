"""Benchmark of weight sync to a pool of Ray samplers on one machine: by Ray's object store, and by broadcast.

    PYTHONPATH=libs/seqpack:libs/chat_tools:libs/rollout python libs/rollout/benchmarks/broadcast.py \
        [--transports objects gloo nccl] [--workers 1 2] [--mib 512] [--times 5]

Weights of `--mib` MiB, in buckets of 64 MiB, go to each sampler, which copies them into memory of its own. Where `nccl`
is among the transports that is device memory, and in every row the sender's weights are on the first device. Prints a
JSON line for each number of samplers and each transport: seconds of the first weight sync, which makes the group, the
least and the median seconds of those after it, and the bytes a second to each sampler by the median.
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
    """A receiver that keeps the bytes it receives and knows no model."""

    def __init__(self, nbytes: int, device: str) -> None:
        self._place = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._missing = nbytes

    async def prepare(self, manifest: Manifest) -> None:
        """Reset the count of missing bytes."""
        del manifest
        self._missing = self._place.numel()

    async def receive(self, bucket: Bucket) -> int:
        """Copy a bucket to its place."""
        for piece in bucket.pieces():
            self._place[piece.offset : piece.offset + piece.flat.numel()].copy_(piece.flat)
            self._missing -= piece.flat.numel()
        return self._missing

    async def commit(self, version: int) -> None:
        """Ignore the version: no model uses the bytes."""
        del version

    async def abort(self) -> None:
        """Ignore the call: no model uses the bytes."""

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Ignore the call: nothing is sampled."""
        del mode

    async def resume(self) -> None:
        """Ignore the call: no request waits."""


def receiving(nbytes: int, device: str) -> dict[str, Handler]:
    """Return the handlers of one sampler, in its actor."""
    memory: Any = Memory(nbytes, device)
    return weight_handlers(memory)


def measure(transport: Any, workers: int, mib: int, times: int, on_device: bool) -> dict[str, Any]:
    """Return one row of the table: the seconds of each weight sync to a new pool."""
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
            start = time.perf_counter()
            asyncio.run(transfer_weights([pool], Manifest(version), buckets(pieces, BUCKET_BYTES)))
            took.append(time.perf_counter() - start)
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
    """Print the row of each number of workers and each transport."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["objects", "gloo"], choices=["objects", "gloo", "nccl"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args()
    on_device = "nccl" in options.transports
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    if on_device:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices[1:])  # of samplers; the first one is the sender's
    with local_ray(cpus=max(options.workers)):
        if on_device:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        for workers in options.workers:
            for transport in options.transports:
                print(json.dumps(measure(transport, workers, options.mib, options.times, on_device)), flush=True)


if __name__ == "__main__":
    main()
