"""Whole weights with shared masters: the curves, scores, files and refusals of the FSDP2 executor."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tensordict import TensorDict

from engines import EngineConfig, NonFiniteError, TrainEngine, build_engine
from engines.testing.executors import inside
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from engines.weights.row_shards import rows_of
from objectives import GRPO, SFT
from seqpack import Objective

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]
STEPS = 3


def engine(weights: Literal["sharded", "replicated"] = "replicated", kind: str = "dense", **options: Any) -> Any:
    usual = {"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "weight_decay": 0.1}
    config = {**usual, "recheck_rows": 0, **options}
    return build_engine(EngineConfig(weights=weights, **config), tiny_model(kind, scale=2.0, num_hidden_layers=2))


def curve(
    built: TrainEngine, objective: Objective | None = None, steps: Iterable[int] = range(STEPS)
) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), objective or SFT()) for step in steps]


def exported(built: TrainEngine) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_equals_fsdp2(kind: str) -> None:
    mine, other = engine(kind=kind), engine("sharded", kind=kind)
    for one, two in zip(curve(mine, GRPO()), curve(other, GRPO()), strict=True):
        assert {k: pytest.approx(v, rel=1e-4, abs=1e-6) for k, v in two.items()} == one
    same(exported(mine), exported(other))
    scores = [built.forward(tiny_batch(LENGTHS))["log_probs"].values() for built in (mine, other)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)


def test_masters_keep_what_bfloat16_loses() -> None:
    """At a rate too small for bfloat16 the weights move all the same, as float32 ones do under FSDP2."""
    mine, other = (
        engine(which, dtype="bfloat16", lr=1e-5, eps=1e-8, max_tokens_per_rank=200)
        for which in ("replicated", "sharded")
    )
    before = exported(other)
    assert all(next(mine.executor.model.parameters()).dtype == torch.bfloat16 for _ in [0])
    for step in range(STEPS):
        batch = tiny_batch(LENGTHS, seed=step)
        assert mine.train_batch(batch, SFT())["loss"] == pytest.approx(
            other.train_batch(batch, SFT())["loss"], rel=1e-3
        )
    moved = [{name: value - before[name] for name, value in exported(built).items()} for built in (mine, other)]
    for name, value in moved[1].items():
        assert float((moved[0][name] - value).norm() / value.norm()) < 0.05, name


@pytest.mark.parametrize(("saves", "loads"), [("replicated", "sharded"), ("sharded", "replicated")])
def test_checkpoints_fit_both(
    tmp_path: Path, saves: Literal["sharded", "replicated"], loads: Literal["sharded", "replicated"]
) -> None:
    whole = engine(saves)
    curve(whole)
    whole.save(tmp_path / "at")
    rest = curve(whole, steps=range(3, 5))
    resumed = engine(loads)
    resumed.load(tmp_path / "at")
    for one, other in zip(curve(resumed, steps=range(3, 5)), rest, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["step"] == other["step"]
    same(exported(whole), exported(resumed))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resume_is_bitwise(tmp_path: Path, dtype: str) -> None:
    whole = engine(dtype=dtype)
    curve(whole)
    whole.save(tmp_path / "at")
    resumed = engine(dtype=dtype)
    resumed.load(tmp_path / "at")
    assert curve(whole, steps=[3]) == curve(resumed, steps=[3])
    left, right = exported(whole), exported(resumed)
    assert all(torch.equal(left[name], right[name]) for name in left)


class Broken:
    """SFT whose loss is multiplied by a number, or whose gradient is; `offset` is added to the loss alone."""

    required_keys = ()
    needs_entropy = False

    def __init__(self, loss: float = 1.0, grad: float = 1.0, offset: float = 0.0) -> None:
        self.factors = loss, grad
        self.offset = offset

    def zero_gradient_rows(self, batch: TensorDict) -> Any:
        return SFT().zero_gradient_rows(batch)

    def __call__(self, log_probs: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, grad = self.factors
        if log_probs.requires_grad:
            log_probs.register_hook(lambda g: g * grad)
        value, metrics = SFT()(log_probs, *rest)
        return value * loss + self.offset, metrics


@pytest.mark.parametrize(
    "broken",
    [Broken(loss=float("nan")), Broken(loss=float("inf")), Broken(grad=float("nan")), Broken(offset=float("inf"))],
)
def test_a_step_that_is_not_finite_changes_nothing(broken: Broken) -> None:
    built = engine(on_nonfinite="skip")
    curve(built, steps=[0])
    before, updates = exported(built), float(inside(built).updates)
    assert built.train_batch(tiny_batch(LENGTHS), broken)["skipped"] == 1.0
    built.guard.in_a_row = 0
    after = exported(built)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert float(inside(built).updates) == updates
    with pytest.raises(NonFiniteError):
        engine().train_batch(tiny_batch(LENGTHS), broken)


def test_offload_and_onload() -> None:
    built, other = engine(dtype="bfloat16"), engine(dtype="bfloat16")
    curve(built, steps=[0])
    curve(other, steps=[0])
    built.offload()
    built.onload()
    assert curve(built, steps=[1]) == curve(other, steps=[1])


def test_a_reference_policy_has_no_moments() -> None:
    config = EngineConfig(device="cpu", weights="replicated", max_tokens_per_rank=20)
    built = build_engine(config, tiny_model(num_hidden_layers=2), trainable=False)
    assert all(one.moments is None for one in inside(built).masters)
    assert built.forward(tiny_batch(LENGTHS))["log_probs"].values().numel() == sum(LENGTHS)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="weights='replicated' cannot be had: replicated weights keep float32 masters"):
        engine(master_dtype="bfloat16")
    with pytest.raises(ValueError, match="compile='on' cannot be had: on a CPU the plain layers are as fast"):
        engine("sharded", compile="on")
    assert "on a CPU" in engine("sharded").executor.compiled.reason


def test_rows_are_those_of_chunk() -> None:
    for size in range(1, 9):
        for parts in range(1, 6):
            chunks = torch.arange(size).chunk(parts)
            for index in range(parts):
                expected = chunks[index].tolist() if index < len(chunks) else []
                assert torch.arange(size)[rows_of(size, parts, index)].tolist() == expected
