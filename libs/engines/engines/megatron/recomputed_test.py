"""Layers that Megatron computes again in the backward pass: the same steps, and nothing left of them afterwards."""

import gc
from typing import Any

import pytest
import torch

from engines import EngineConfig
from engines.capability import refuse_unsupported
from engines.proofs.megatron_layouts import LENGTHS, LayoutCase, engine_of, largest_difference
from engines.testing.executors import inside, weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import SFT


def test_recomputed_layers_change_nothing() -> None:
    batch = tiny_batch(list(LENGTHS))
    built = [engine_of(LayoutCase("Qwen3.5"), gradient_checkpointing=on, recheck_rows=0) for on in (False, True)]
    calls = []
    for engine in built:
        mixer = inside(engine).stages[0].decoder.layers[0].self_attention
        mixer.register_forward_hook(lambda *_: calls.append(1))
        micro_batches = engine.train_batch(batch, SFT())["micro_batches"]
        calls.append(0)
    per_engine = "".join(map(str, calls)).split("0")
    assert [len(one) for one in per_engine[:2]] == [micro_batches, 2 * micro_batches]
    assert largest_difference(*(weights(engine) for engine in built)) == 0


@pytest.mark.parametrize("model", ["Qwen3.5", "Qwen3.5 MoE"])
def test_recomputed_layers_leave_nothing_behind(model: str) -> None:
    """No activation of a step outlives it, which with megatron-core 0.19 all of them did."""
    lengths = [61, 7, 83]
    shapes = {}
    for on in (False, True):
        engine = engine_of(LayoutCase(model), gradient_checkpointing=on, max_tokens_per_rank=256)
        for _ in range(2):
            engine.train_batch(tiny_batch(lengths), SFT())
        gc.collect()
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        shapes[on] = sorted(tuple(one.shape) for one in alive if sum(lengths) in one.shape)
        del engine, alive
    assert shapes[True] == shapes[False]


@pytest.mark.parametrize("recomputed", [False, True])
def test_forward_passes_ahead_spare_those_that_count(recomputed: bool) -> None:
    """A pass each, none beside where all run ahead; loss, gradient and weights are those of a pass that counts all."""
    case, batch = LayoutCase("Qwen3.5 MoE, router's losses"), tiny_batch(list(LENGTHS))
    results: dict[int, Any] = {}
    calls: dict[int, list[bool]] = {}
    for ahead in (-1, 0, 1, 100):  # -1: as pipeline stages do
        options: dict[str, Any] = {"router_forwards_ahead": max(ahead, 0), "recheck_rows": 0}
        built: Any = engine_of(case, gradient_checkpointing=recomputed, **options)
        built.executor._run_ahead = ahead
        seen = calls[ahead] = []
        built.executor.stages[0].register_forward_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
        results[ahead] = built.train_batch(batch, SFT()), weights(built)
    count = int(results[0][0]["micro_batches"])
    assert count > 2
    assert [len(one) for one in calls.values()] == [2 * count, 2 * count - 1, 2 * count - 2, count]
    for metrics, trained in results.values():
        for key in ("loss", "grad_norm", "auxiliary_loss"):
            assert metrics[key] == pytest.approx(results[-1][0][key], rel=1e-6), key
        assert largest_difference(trained, results[-1][1]) < 1e-6
    with pytest.raises(ValueError, match="stages begin with backward passes early"):
        refuse_unsupported(EngineConfig(backend="megatron", pipeline_parallel=2, router_forwards_ahead=1))
