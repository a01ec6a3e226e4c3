"""Layers that Megatron computes again in the backward pass: the same steps, and nothing left of them afterwards."""

import gc

import pytest
import torch

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
