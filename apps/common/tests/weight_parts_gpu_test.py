"""Trainer ranks to vLLM's workers by CUDA IPC: each worker samples from all ranks' shards, which no rank has whole."""

import asyncio
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.tiny import tiny_batch
from objectives import SFT
from rollout.errors import NotFiniteError
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, HEADS, SIZES
from rollout.vllm.testing.served import PROMPTS, config, distances, sample, served
from rollout.workers.authentication import SECRET
from schedules.protocols import WeightExport
from schedules.runtime.interrupts import Runner
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.weights import shard_buckets
from schedules.weights.weight_sync import sync_weights

DEVICES = 2
pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(
        torch.cuda.device_count() < DEVICES or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason=f"needs {DEVICES} CUDA devices, and TESSERA_VLLM_PYTHON: an interpreter with vLLM for them",
    ),
]
SPREAD: dict[str, dict[str, Any]] = {"workers": {"tensor_parallel": 2}, "copies": {"data_parallel": 2}}


class Exporting:
    """A trainer of which a weight sync needs its export alone."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def export_weights(self, module_names: bool) -> WeightExport:
        """Return this rank's shards."""
        return WeightExport((), shards=self.engine.export_shards(live=module_names))


def trained(engine: Any, path: Path) -> Any:
    """Return a module with the trainer's present weights, of all ranks; collective."""
    model = AutoModelForCausalLM.from_pretrained(path)
    whole = {piece.name: piece.flat for piece in engine.export_weights(max_bytes=2**40, live=True)}
    for name, parameter in model.named_parameters():
        parameter.data.copy_(whole[name].view(parameter.shape))
    return model.cuda()


def on_ranks(path: Path, spread: str) -> dict[str, Any]:
    """Three syncs, one of them of weights that are not finite, and how far the sampler is from the trainer."""
    engine: Any = build_engine(EngineConfig(model=str(path), device="cuda", lr=0.1, weights="sharded", prove="off"))
    rank = dist.get_rank()
    found: dict[str, Any] = {"seconds": [], "distances": [], "parts": False}
    own = config(memory_share=0.15, graph_sizes=(1, 4, 16), arguments=ARGUMENTS, **SPREAD[spread])
    sampler: Any = VllmEngine(path, own) if rank == 0 else RemoteSampler(0)
    trainer: Any = Exporting(engine)
    last = trained(engine, path)
    with Runner() as runner:
        for version in (1, 2):
            engine.train_batch(tiny_batch([7, 12, 5, 3], vocab=200, seed=version), SFT())
            dist.barrier()
            begun = time.perf_counter()
            sync_weights(trainer, sampler, version, runner, module_names=False)
            found["seconds"].append(time.perf_counter() - begun)
            model = trained(engine, path)
            if rank == 0:
                answers = sample(sampler, PROMPTS)
                far = [float(distances(one, PROMPTS, answers).mean()) for one in (model, last)]
                found["distances"].append(far)
            last = model
        found["parts"] = shard_buckets._regions.cache_info().currsize == 1
        if rank == 1:
            with torch.no_grad():
                next(iter(engine.executor.model.parameters())).to_local().fill_(float("nan"))
        with pytest.raises((NotFiniteError, ValueError), match=r"not finite|another process"):
            sync_weights(trainer, sampler, 3, runner, module_names=False)
        assert sampler.version == 2
        if rank == 0:
            found["kept"] = float(distances(last, PROMPTS, sample(sampler, PROMPTS)).mean())
            asyncio.run(sampler.abort())
            sampler.close()
    dist.barrier()
    return found


@pytest.mark.parametrize("spread", SPREAD)
def test_workers_read_their_parts_of_all_ranks_shards(
    spread: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, secrets.token_hex(32))
    served(**SIZES, **HEADS).save_pretrained(tmp_path)
    found = launch(on_ranks, (tmp_path, spread), world_size=DEVICES, device="cuda")
    sys.stdout.write(json.dumps({"spread": spread, **found}) + "\n")
    assert found["parts"], "the ranks sent their shards, in place of laying them out"
    for new, old in found["distances"]:
        assert new < CLOSE
        assert old > FAR
    assert found["kept"] < CLOSE
