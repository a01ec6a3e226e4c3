"""NaN and divergence over every executor: no update, an error that says where, no export."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import EngineConfig, NonFiniteError, build_engine
from engines.testing.executors import BUILDERS, LENGTHS, assert_same_weights, engine, inside, weights
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import GRPO, SFT
from seqpack.batches.jagged import jagged_like

EXECUTORS = pytest.mark.parametrize("executor", BUILDERS)


class Broken(SFT):
    """An objective whose loss is multiplied by something."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        object.__setattr__(self, "factor", factor)

    def __call__(self, *args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, metrics = super().__call__(*args)
        return loss * self.__dict__["factor"], metrics


@EXECUTORS
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(executor: str, factor: float) -> None:
    built: Any = engine(executor=executor)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    before = weights(built)
    with pytest.raises(NonFiniteError, match=r"step 2: the loss is (nan|inf); no update was made"):
        built.train_batch(tiny_batch(LENGTHS), Broken(factor))
    assert built.step == 1
    for name, value in weights(built).items():
        assert torch.equal(value, before[name])


@EXECUTORS
def test_a_far_token_is_counted_and_a_nan_ends_the_run(executor: str) -> None:
    """One log-ratio beyond float32 made the gradient NaN under a finite loss."""
    built: Any = engine(executor=executor)
    batch = tiny_batch(LENGTHS)
    first = int(batch["loss_mask"].values().nonzero()[0])
    for step, old in enumerate((-math.inf, -101.0, math.nan), 1):
        values = built.forward(batch)["log_probs"].values().clone()
        values[first] = old
        batch["old_log_probs"] = jagged_like(values, batch["input_ids"])
        if math.isnan(old):
            with pytest.raises(NonFiniteError, match=f"step {step}: the loss is nan; no update was made"):
                built.train_batch(batch, GRPO())
            continue
        result = built.train_batch(batch, GRPO())
        assert math.isfinite(result["loss"])
        assert 0 < result["grad_norm"] < 1e3
        assert result["ratio/clamped"] == pytest.approx(1 / result["trained_tokens"])


@EXECUTORS
def test_skipped_steps_are_counted_and_change_nothing(executor: str, tmp_path: Path) -> None:
    built: Any = engine(executor=executor, on_nonfinite="skip")
    before = weights(built)
    result = built.train_batch(tiny_batch(LENGTHS), Broken(math.nan))
    assert (result["skipped"], result["skipped_steps"], built.step) == (1.0, 1.0, 0)
    for name, value in weights(built).items():
        assert torch.equal(value, before[name])
    fresh, after = engine(executor=executor), built.train_batch(tiny_batch(LENGTHS), SFT())
    assert (after["skipped"], after["skipped_steps"], after["step"]) == (0.0, 1.0, 1.0)
    assert after["loss"] == fresh.train_batch(tiny_batch(LENGTHS), SFT())["loss"]
    assert_same_weights(fresh, built, tolerance=0.0)
    built.save(tmp_path / "one")
    fresh.load(tmp_path / "one")
    assert fresh.train_batch(tiny_batch(LENGTHS), SFT())["skipped_steps"] == 1.0


@EXECUTORS
def test_a_run_whose_last_step_was_skipped_is_exported(
    executor: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the weights of the step before; where they are not finite, with none."""
    built: Any = engine(executor=executor, on_nonfinite="skip")
    batch = tiny_batch(LENGTHS)
    for factor in (1.0, math.nan, 1.0, math.nan, math.inf):
        built.train_batch(batch, Broken(factor))
    built.save_hf(tmp_path / "export")
    assert "exported after 3 skipped steps, the last 2 in a row" in caplog.text
    again: Any = build_engine(EngineConfig(model=str(tmp_path / "export"), device="cpu"))
    scores = [one.forward(batch)["log_probs"].values() for one in (again, built)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=1e-5)
    stops: Any = engine(executor=executor)
    with pytest.raises(NonFiniteError, match="step 1"):
        stops.train_batch(batch, Broken(math.nan))
    with pytest.raises(NonFiniteError, match="the last 1 steps made no update"):
        stops.save_hf(tmp_path / "stopped")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]


def test_skipped_steps_export_no_weight_that_is_not_finite(tmp_path: Path) -> None:
    built: Any = engine(on_nonfinite="skip")
    with torch.no_grad():
        next(inside(built).model.parameters()).fill_(math.inf)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight has values that are not finite"):
        built.save_hf(tmp_path / "export")
    assert not (tmp_path / "export").exists()


@EXECUTORS
def test_ten_skipped_steps_in_a_row_end_a_run(executor: str) -> None:
    built = engine(executor=executor, on_nonfinite="skip")
    batch = tiny_batch([5, 4])
    for _ in range(9):
        built.train_batch(batch, Broken(math.nan))
    built.train_batch(batch, SFT())
    for _ in range(9):
        built.train_batch(batch, Broken(math.nan))
    with pytest.raises(NonFiniteError, match="10 steps in a row"):
        built.train_batch(batch, Broken(math.nan))


@EXECUTORS
def test_a_gradient_that_is_not_finite_ends_the_run(executor: str) -> None:
    """The loss is finite, the gradient of sqrt at 0 is not."""

    class Infinite(SFT):
        def __call__(self, log_probs: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return (log_probs * 0).sum().sqrt(), {}

    built = engine(executor=executor)
    with pytest.raises(NonFiniteError, match="step 1: the gradient norm is nan"):
        built.train_batch(tiny_batch(LENGTHS), Infinite())


def test_divergence_never_ends_as_an_export(tmp_path: Path) -> None:
    """A learning rate that is absurd: an error at the second step, or when the first one's weights are exported."""
    built = engine(lr=1e30)
    built.train_batch(tiny_batch(LENGTHS), SFT())
    with pytest.raises(NonFiniteError, match="step 2: "):
        built.train_batch(tiny_batch(LENGTHS), SFT())
    with pytest.raises(NonFiniteError, match="the last 1 steps"):
        built.save_hf(tmp_path / "export")
    with torch.no_grad():
        next(inside(built).model.parameters()).fill_(math.inf)
    with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight has values that are not finite"):
        list(built.export_weights())
    assert not list(tmp_path.iterdir())


@EXECUTORS
def test_a_step_that_failed_leaves_no_gradient_behind(executor: str) -> None:
    class Raises(SFT):
        calls = 0

        def __call__(self, *args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            type(self).calls += 1
            if self.calls > 1:
                raise KeyError("the objective's own mistake")
            return super().__call__(*args)

    built, fresh = engine(executor=executor, max_tokens_per_rank=20), engine(executor=executor, max_tokens_per_rank=20)
    with pytest.raises(KeyError, match="mistake"):
        built.train_batch(tiny_batch(LENGTHS), Raises())
    batch = tiny_batch(LENGTHS, seed=1)
    assert built.train_batch(batch, SFT()) == fresh.train_batch(batch, SFT())
    assert_same_weights(fresh, built, tolerance=0.0)
