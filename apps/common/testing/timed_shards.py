"""A rank of a weight sync shard to shard, timed: every rank has a part of the weights, and samplers take all of them.

`python -m apps.common.testing.timed_shards OUT MIB SAMPLERS [DEVICE]` under torchrun: the first SAMPLERS ranks have a
sampler, and rank N writes the file N in the folder OUT.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from rollout.native.engine import NativeEngine
from rollout.workers.authentication import AuthenticationError
from rollout.workers.shard_exchange import ShardGroup, describe, plan_of
from schedules.protocols import WeightExport
from schedules.runtime.interrupts import Runner
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.weights import shard_buckets
from schedules.weights.weight_sync import SHARD_BYTES, sync_weights

TIMES = 3
WIDTH = 1024


class SeenGroup(ShardGroup):
    """A group that notes the kinds of devices whose memory buckets leave from."""

    kinds: ClassVar[set[str]] = set()

    def send(self, data: torch.Tensor, target: int) -> Callable[[], None]:
        """Begin to send bytes, as `ShardGroup` does."""
        self.kinds.add(data.device.type)
        return super().send(data, target)


class Exporting:
    """A trainer of which a weight sync needs its export alone."""

    def __init__(self, engine: object) -> None:
        self.engine = engine

    def export_weights(self, module_names: bool) -> WeightExport:
        """Return this rank's shards."""
        engine: object = self.engine
        shards = engine.export_shards(live=module_names)  # type: ignore[attr-defined]
        return WeightExport((), shards=shards)


def rank_main(out: str, mib: int, samplers: int, device: str) -> None:
    """Train a step, give the samplers the weights, and write seconds and bytes to the file OUT/rank."""
    vocabulary = mib * 2**20 // 4 // WIDTH
    sizes = {"hidden_size": WIDTH, "vocab_size": vocabulary, "intermediate_size": 256, "num_hidden_layers": 2}
    kinds = {"tie_word_embeddings": True}
    operators = {"npu_operators": "off"} if device == "npu" else {}
    config = EngineConfig(device=device, lr=1e-2, weights="sharded", max_tokens_per_rank=64, **operators)  # type: ignore[arg-type]
    engine = build_engine(config, tiny_model("attention", **sizes, **kinds))
    engine.train_batch(tiny_batch([7, 12, 5, 3]), SFT())
    rank, model = dist.get_rank(), tiny_model("attention", **sizes, **kinds).to(device)
    vars(shard_buckets)["ShardGroup"] = SeenGroup
    sampler = NativeEngine(model) if rank < samplers else RemoteSampler(0)
    seconds = []
    try:
        with Runner() as runner:
            for version in range(1, TIMES + 1):
                dist.barrier()
                begun = time.perf_counter()
                sync_weights(Exporting(engine), sampler, version, runner, module_names=True)  # type: ignore[arg-type]
                dist.barrier()
                seconds.append(time.perf_counter() - begun)
    except AuthenticationError as error:
        Path(out, str(rank)).write_text(json.dumps({"rank": rank, "refused": str(error)}))
        return
    group = ShardGroup(dist.group.WORLD, torch.device("cpu"))
    plan = plan_of(group, describe(engine.export_shards(live=True), rank < samplers), SHARD_BYTES)
    sent, taken = plan.bytes_of(rank)
    whole = {piece.name: piece.flat for piece in engine.export_weights(max_bytes=2**40, live=True)}
    same = rank >= samplers or all(
        torch.equal(value.reshape(-1).cpu(), whole[name].cpu()) for name, value in model.named_parameters()
    )
    size = sum(value.numel() * value.element_size() for value in whole.values())
    result = {"rank": rank, "seconds": seconds, "sent": sent, "taken": taken, "same": same, "weights": size}
    result |= {"from": sorted(SeenGroup.kinds), "backends": dist.get_backend_config()}
    Path(out, str(rank)).write_text(json.dumps(result))


if __name__ == "__main__":
    kind = (sys.argv[4:] or ["cpu"])[0]
    launch(rank_main, (sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), kind), device=kind, timeout_seconds=300)
