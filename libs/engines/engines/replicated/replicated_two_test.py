"""Whole weights with shared masters on two and three gloo processes: the curves, scores, weights and files of one."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.proofs.forked_ranks import launch_forked
from engines.replicated import bucket_exchange as exchange
from engines.testing.executors import inside
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]


def engine(kind: str = "dense", **options: Any) -> Any:
    config = {"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "weight_decay": 0.1, **options}
    return build_engine(EngineConfig(weights="replicated", **config), tiny_model(kind, scale=2.0, num_hidden_layers=2))


def curve(built: Any, steps: Iterable[int] = range(3)) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), SFT()) for step in steps]


def exported(built: Any) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=tolerance, atol=tolerance)


def on_ranks(folder: Path) -> dict[Any, Any]:
    """Curves, weights, scores and a resumed run, of engines whose micro-batches differ in number."""
    out: dict[Any, Any] = {}
    for dtype in ("float32", "bfloat16"):
        for cap in (20, 200):
            built = engine(dtype=dtype, max_tokens_per_rank=cap)
            losses = [(row["loss"], row["grad_norm"]) for row in curve(built)]
            for step in (3, 4):
                built.forward_backward(tiny_batch(LENGTHS, seed=step), SFT())
            losses += [(row["loss"], row["grad_norm"]) for row in (built.optimizer_step(lr=5e-3, betas=(0.8, 0.9)),)]
            out[dtype, cap] = losses, exported(built), built.forward(tiny_batch(LENGTHS))["log_probs"].values()
    built.save(folder)
    resumed = engine(dtype="bfloat16", max_tokens_per_rank=200)
    resumed.load(folder)
    out["resumed"] = (exported(resumed), curve(resumed, steps=[3]) == curve(built, steps=[3]))
    moe = engine(kind="moe")
    out["moe"] = [row["loss"] for row in curve(moe)], exported(moe)
    return out


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    one, two = (launch(on_ranks, (tmp_path / str(ranks),), world_size=ranks) for ranks in (1, 2))
    for cap in (20, 200):
        (losses, weights, scores), (others, other_weights, other_scores) = one["float32", cap], two["float32", cap]
        assert [pytest.approx(row, rel=1e-4) for row in losses] == others
        same(weights, other_weights, 1e-4)
        torch.testing.assert_close(scores, other_scores, rtol=1e-3, atol=1e-4)
        for row, other in zip(one["bfloat16", cap][0], two["bfloat16", cap][0], strict=True):
            assert row == pytest.approx(other, rel=3e-2)
    assert one["resumed"][1]
    assert two["resumed"][1]
    same(two["bfloat16", 200][1], two["resumed"][0], 0)
    assert one["moe"][0] == pytest.approx(two["moe"][0], rel=1e-4)
    same(one["moe"][1], two["moe"][1], 1e-4)


def in_parts(large: int) -> tuple[Any, ...]:
    """A curve where parameters of so many entries travel by themselves, and how many do; weights whoever reads them."""
    exchange.LARGE = large
    built = engine(dtype="float32", max_tokens_per_rank=200)
    buckets = inside(built).exchange.buckets
    losses = [(row["loss"], row["grad_norm"]) for row in curve(built)]
    read = [inside(built).exchange.settled]
    scores = built.forward(tiny_batch(LENGTHS))["log_probs"].values()
    read.append(inside(built).exchange.settled)
    weights = exported(built)
    curve(built, steps=[3])
    ids = torch.arange(12)[None] % 50
    stock = [built.executor.model(input_ids=ids).logits]  # who holds the module and calls it
    read.append(inside(built).exchange.settled)
    stock.append(built.executor.model(input_ids=ids).logits)
    curve(built, steps=[4])
    built.offload()
    read.append(inside(built).exchange.settled)
    built.onload()
    return sum(len(b.large) for b in buckets), losses, scores, weights, torch.equal(*stock), read, exported(built)


def test_large_parameters_by_themselves_change_nothing_and_weights_are_waited_for_where_they_are_read() -> None:
    (_, losses, scores, weights, *_, last), together, *apart = (
        launch_forked(in_parts, (large,), world_size=ranks)
        for ranks, large in ((1, 16), (2, exchange.LARGE), (2, 16), (3, 16))
    )
    assert together[0] == 0
    assert apart[0][0] > apart[1][0] > 0  # of three ranks not all rows are equal in number
    for _, others, other_scores, other_weights, stock, read, other_last in (together, *apart):
        assert [pytest.approx(row, rel=1e-4) for row in losses] == others
        torch.testing.assert_close(scores, other_scores, rtol=1e-3, atol=1e-4)
        same(weights, other_weights, 1e-4)
        same(last, other_last, 1e-3)
        assert stock
        assert read == [False, True, True, True]
