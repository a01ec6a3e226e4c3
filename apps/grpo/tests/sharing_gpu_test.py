"""On one GPU: a sampler over the trainer's replicated bfloat16 weights answers as one over copies, in less memory."""

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, SharedParameters, build_engine, shared_parameters
from engines.launch import ensure_group
from engines.loading import empty_module, load_model
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import SFT
from rollout import Completion, NativeEngine, Sampling, SharingEngine, share_weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = [[3, 4, 5], [6, 7], list(range(40, 140)), [3, 4, 5]]
HOW = Sampling(max_new_tokens=24, seed=5)
BLOCK = 512
"""Bytes to which the allocator rounds each tensor up."""


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cuda")
    yield
    if made:
        torch.distributed.destroy_process_group()


def lent(engine: Any) -> SharedParameters:
    found = shared_parameters(engine)
    assert isinstance(found, SharedParameters), found
    return found


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def told(done: list[Completion]) -> list[Any]:
    return [(c.ids, c.log_probs, c.policy_versions) for c in done]


@pytest.mark.parametrize("weights", ["auto", "replicated"])  # "auto" is replicated on one GPU
def test_replicated_weights_are_on_the_device_once(weights: Any, tmp_path: Path) -> None:
    """2 bytes a parameter less, at rest and at each hand-over; tokens and log-probs equal bit for bit over steps."""
    model: Any = tiny_model("dense", scale=1.0, **{**FUSED_SIZES, "vocab_size": 32768}).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cuda", lr=1e-3, max_tokens_per_rank=2048, weights=weights)
    engine: Any = build_engine(config)
    engine.train_batch(tiny_batch([300, 200], vocab=512), SFT())  # what kernels and allocator keep is there from here
    sizes = [p.numel() for p in engine.executor.model.parameters()]

    places = [allocated()]
    shared = SharingEngine(empty_module(config, torch.bfloat16), lent(engine), seed=1)
    places.append(allocated())
    own = load_model(config, dtype=torch.bfloat16, device=torch.device("cuda"))
    copies = NativeEngine(own, seed=1)
    copies.load_weights(1, engine.export_weights(live=True))
    asyncio.run(share_weights(shared, 1, lent(engine)))
    places.append(allocated())
    sharing, copying = places[1] - places[0], places[2] - places[1]
    print({"parameters": sum(sizes), "bytes of sharing": sharing, "bytes of copying": copying})
    assert abs(copying - sharing - 2 * sum(sizes)) <= BLOCK * len(sizes)

    seen = []
    for version in range(2, 5):
        seen.append(told(shared.generate_batch(PROMPTS, HOW)))
        assert seen[-1] == told(copies.generate_batch(PROMPTS, HOW))
        engine.train_batch(tiny_batch([700, 5, 333], seed=version, vocab=512), SFT())
        peaks = []
        for sharer in (True, False):
            before = allocated()
            torch.cuda.reset_peak_memory_stats()
            if sharer:
                asyncio.run(share_weights(shared, version, lent(engine)))
            else:
                copies.load_weights(version, engine.export_weights(live=True))
            peaks.append(torch.cuda.max_memory_allocated() - before)
        print({"peak of a hand-over, shared and copied": peaks})
        assert peaks[1] - peaks[0] > sum(sizes)
    assert seen[0] != seen[1] != seen[2]
    mine = {p.data_ptr() for p in shared._model.parameters()}
    assert mine == {p.data_ptr() for p in engine.executor.model.parameters()}
