"""On one CUDA device: images under Megatron, before a frozen or a trained tower, give FSDP2's steps."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engines import EngineConfig, TrainEngine, build_engine
from engines.proofs.megatron_layouts import exported_by
from engines.testing.images import media_sample
from engines.testing.megatron_curves import EXPERTS, Curve
from engines.testing.one_megatron_rank import one_megatron_gpu  # noqa: F401  each test here has a group
from engines.testing.vision import SETTINGS, TOWER, fused_vision_model
from objectives import SFT
from seqpack import make_batch

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODELS: dict[str, dict[str, Any]] = {
    "vision": {},
    "vision_moe": {**EXPERTS, "shared_expert_intermediate_size": 256},
}
"""By kind of `engines.tiny.tiny_model`: changes of its text part."""
SAMPLES: tuple[tuple[list[int], list[tuple[int, int, int]]], ...] = (
    ([30, 9], [(1, 4, 6)]),
    ([200], []),
    ([3, 40, 5], [(1, 8, 8), (1, 2, 2)]),
    ([700], []),
    ([1, 1], [(1, 2, 2)]),
)
"""Stretches of text and the images between them: some rows have none, one has an image and next to nothing else."""
BOUNDS = {"float32": (1e-5, 1e-3), "bfloat16": (5e-3, 0.03)}
"""(loss, gradient norm), relative."""


def rows(seed: int) -> TensorDict:
    made = [media_sample(SETTINGS, text, grids, seed=seed * 10 + i) for i, (text, grids) in enumerate(SAMPLES)]
    return make_batch(made)


def engine(kind: str, backend: Any, dtype: Any, vision: Any, **options: Any) -> TrainEngine:
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    usual: dict[str, Any] = {"device": DEVICE, "lr": 1e-3, "eps": 1e-2, "max_tokens_per_rank": 1024}
    config = EngineConfig(backend=backend, dtype=dtype, vision=vision, **usual | options)
    return build_engine(config, fused_vision_model(kind, **MODELS[kind]))


def steps(kind: str, backend: str, dtype: str, vision: str) -> Curve:
    # Not GRPO: on its own samples its loss is the same whatever the model says.
    built = engine(kind, backend, dtype, vision)
    metrics = [built.train_batch(rows(seed), SFT()) for seed in range(2)]
    return [(step["loss"], step["grad_norm"], step["skipped"]) for step in metrics]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("vision", ["frozen", "trained"])
@pytest.mark.parametrize("kind", MODELS)
def test_same_steps_as_fsdp2(kind: str, vision: str, dtype: str) -> None:
    loss, norm = BOUNDS[dtype]
    want, got = (steps(kind, backend, dtype, vision) for backend in ("fsdp2", "megatron"))
    print(kind, vision, dtype, want, got)
    for one, other in zip(want, got, strict=True):
        assert one[2] == other[2] == 0.0
        assert one[1] > 0
        assert other[0] == pytest.approx(one[0], rel=loss, abs=loss)
        assert other[1] == pytest.approx(one[1], rel=norm)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("kind", MODELS)
def test_a_frozen_tower_stays_bit_for_bit_and_a_trained_one_moves(kind: str, dtype: str) -> None:
    # A large lr: what moves by less than a rounding of bfloat16 moves in its master alone.
    for vision in ("frozen", "trained"):
        built = engine(kind, "megatron", dtype, vision, lr=0.1, eps=1e-8)
        before = exported_by(built)
        built.train_batch(rows(0), SFT())
        moved = {name for name, value in exported_by(built).items() if not torch.equal(value, before[name])}
        assert {name for name in moved if not name.startswith(TOWER)}
        assert {name for name in before if name.startswith(TOWER)}
        assert any(name.startswith(TOWER) for name in moved) == (vision == "trained")
