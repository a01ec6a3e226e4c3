"""The step over a model of one table, in float64: every number that it returns is derived again, row by row.

The executors of real models are in step_executors_test and step_two_test; here are the engine's own decisions, over
random batches.
"""

import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engines import EngineConfig, LocalBatch, NonFiniteError
from engines.execution.loss import STEP_METRICS
from engines.execution.lr_schedule import learning_rate
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.step import Engine
from engines.storage.manifest import read_manifest
from engines.testing.bigram_executor import Bigram, BigramExecutor
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from seqpack import PackedBatch, Totals, make_batch, view_batch

VOCAB = 7
LR = 0.5


class Weighted:
    """Every trained token's -log p times its advantage, over the trained tokens; an entropy bonus where asked for."""

    required_keys = ("advantages",)

    def __init__(self, entropy: bool = False) -> None:
        self.needs_entropy = entropy
        self.totals: list[Totals] = []
        self.rows: list[Any] = []

    def zero_gradient_rows(self, batch: Any) -> torch.Tensor:
        view = view_batch(batch)
        counts = view.row_sums((view.flat("advantages") != 0) & view.trained)
        return counts == 0

    def __call__(
        self, log_probs: torch.Tensor, entropy: torch.Tensor | None, packed: PackedBatch, totals: Totals
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.totals.append(totals)
        self.rows.append(packed.indices)
        weight = packed.values["advantages"] * packed.values["loss_mask"]
        loss = -(weight * log_probs).sum() / totals.tokens
        if entropy is not None:
            loss = loss - 0.1 * (entropy * packed.values["loss_mask"]).sum() / totals.sequences
        mask = packed.values["loss_mask"]
        largest = torch.where(mask, -log_probs, 0.0).max()
        return loss, {
            "nll": torch.stack([-(log_probs * mask).sum(), mask.sum().double()]),
            "worst/max": largest,
            "rows": torch.tensor(float(mask.any())),
        }


def build(cap: int = 20, **options: Any) -> Any:
    trainable = options.pop("trainable", True)
    clip = options.pop("clip", 1e9)
    config = EngineConfig(**{"device": "cpu", "lr": LR, "max_tokens_per_rank": cap, **options})
    groups = ParallelGroups.make(ParallelLayout())
    executor: Any = BigramExecutor(groups, Bigram(VOCAB), trainable, clip)
    nothing: Any = None
    return Engine(config, executor, DataParallelPlanner(cap, 1), weights=nothing)  # nothing here is exported


def batch_of(lengths: list[int], seed: int = 0, idle: Iterable[int] = ()) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for row, length in enumerate(lengths):
        mask = torch.rand(length, generator=generator) < 0.6
        mask[0] = False
        mask[-1] = length > 1
        advantage = torch.rand(length, generator=generator) + 0.5
        samples.append(
            {
                "input_ids": torch.randint(0, VOCAB, (length,), generator=generator),
                "loss_mask": mask,
                "advantages": advantage * (row not in idle),
                "group": row // 2,
            }
        )
    return make_batch(samples)


def by_hand(
    model: Bigram, batch: TensorDict, temperature: float = 1.0, entropy: bool = False
) -> tuple[float, Any, list[Any]]:
    """(loss, gradient of the table, log-probs and entropies by row), one token at a time."""
    table = model.table.detach().clone().requires_grad_()
    masks = [row.tolist() for row in batch["loss_mask"].unbind()]
    tokens, rows = sum(map(sum, masks)), sum(map(any, masks))
    loss, scores = torch.zeros((), dtype=torch.float64), []
    for ids, mask, advantages in zip(batch["input_ids"].unbind(), masks, batch["advantages"].unbind(), strict=True):
        row_scores = [[0.0, 0.0]]
        for place in range(1, len(ids)):
            probabilities = torch.softmax(table[ids[place - 1]] / temperature, 0)
            chosen, spread = probabilities[ids[place]].log(), -(probabilities * probabilities.log()).sum()
            row_scores.append([chosen.item(), spread.item()])
            if mask[place]:
                loss = loss - advantages[place] * chosen / tokens
                loss = loss - 0.1 * spread / rows if entropy else loss
        scores.append(row_scores)
    loss.backward()
    return loss.item(), table.grad, scores


rows = st.lists(st.integers(1, 12), min_size=1, max_size=9).filter(lambda sizes: max(sizes) > 1)


@settings(deadline=None, max_examples=40)
@given(rows, st.integers(12, 40), st.integers(0, 99), st.booleans(), st.sampled_from([0.5, 1.0, 2.0]), st.data())
def test_a_step_is_that_of_the_whole_batch(
    lengths: list[int], cap: int, seed: int, entropy: bool, temperature: float, data: st.DataObject
) -> None:
    idle = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    batch = batch_of(lengths, seed, idle)
    objective: Any = Weighted(entropy)
    if entropy:  # then no row is without a gradient, as an objective with an entropy bonus says itself
        objective.zero_gradient_rows = lambda view: torch.zeros(len(lengths), dtype=torch.bool)
    built = build(cap, temperature=temperature)
    loss, gradient, _ = by_hand(built.executor.model, batch, temperature, entropy)
    before = built.executor.model.table.detach().clone()
    result = built.train_batch(batch, objective)
    assert result["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-7)
    torch.testing.assert_close(built.executor.model.table.detach(), before - LR * gradient, atol=1e-6, rtol=1e-6)
    assert result["grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-6, abs=1e-7)

    assert set(result) - {"nll", "worst/max", "rows"} <= STEP_METRICS

    masks = [row.tolist() for row in batch["loss_mask"].unbind()]
    trained = {row for row, mask in enumerate(masks) if any(mask)}
    computed = [row for row in range(len(lengths)) if entropy or (row in trained and row not in idle)]
    totals = Totals(sum(map(sum, masks)), len(trained), len({row // 2 for row in trained}))
    assert set(objective.totals) == {totals}
    assert sorted(row for micro_batch in built.executor.seen for row in micro_batch.rows) == computed
    plan = built.plan([lengths[row] for row in computed or [0]])
    assert {key: value for key, value in result.items() if key not in ("loss", "grad_norm", "nll", "worst/max")} == {
        "lr": LR,
        "step": 1.0,
        "tokens": sum(lengths),
        "sequences": len(lengths),
        "trained_tokens": totals.tokens,
        "computed_tokens": sum(lengths[row] for row in computed),
        "computed_sequences": len(computed),
        "micro_batches": plan.num_micro_batches,
        "fill": pytest.approx(sum(lengths[row] for row in computed or [0]) / (cap * plan.num_micro_batches)),
        "plan_hash": plan.hash,
        "skipped": 0.0,
        "skipped_steps": 0.0,
        "rows": sum(any(masks[row] for row in one.rows if any(masks[row])) for one in built.executor.seen),
    }


@settings(deadline=None, max_examples=40)
@given(rows, st.integers(12, 40), st.integers(0, 99), st.booleans(), st.sampled_from([None, 0.5, 2.0]))
def test_scores_are_those_of_every_token(
    lengths: list[int], cap: int, seed: int, entropy: bool, temperature: float | None
) -> None:
    batch = batch_of(lengths, seed)
    built = build(cap, temperature=0.7)
    _, _, want = by_hand(built.executor.model, batch, temperature or 0.7)
    scored = built.forward(batch.exclude("loss_mask", "advantages"), entropy=entropy, temperature=temperature)
    assert torch.equal((scored["log_probs"] * batch["loss_mask"] != 0).values(), batch["loss_mask"].values())
    assert set(scored.keys()) == ({"log_probs", "entropy"} if entropy else {"log_probs"})
    for column, key in enumerate(("log_probs", "entropy")[: 1 + entropy]):
        assert scored[key].dtype == torch.float32
        for row, values in enumerate(scored[key].unbind()):
            assert values.tolist() == pytest.approx([entry[column] for entry in want[row]], abs=1e-5)


@settings(deadline=None, max_examples=40)
@given(rows, st.integers(12, 30), st.integers(0, 99), st.randoms(), st.data())
def test_parts_in_any_order(
    lengths: list[int], cap: int, seed: int, random: random.Random, data: st.DataObject
) -> None:
    idle = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    batch = batch_of(lengths, seed, idle)
    order = list(range(len(lengths)))
    random.shuffle(order)
    part = LocalBatch(view_batch(batch).select(order), tuple(order), tuple(lengths))
    whole, parts = build(cap), build(cap)
    objectives = Weighted(), Weighted()
    want, got = whole.train_batch(batch, objectives[0]), parts.train_batch(part, objectives[1])
    for key in ("loss", "grad_norm", "nll", "worst/max", "tokens", "sequences", "trained_tokens"):
        assert got[key] == pytest.approx(want[key], rel=1e-6, abs=1e-7), key
    used = [row for one in parts.executor.seen for row in one.rows]
    assert sorted(used) == sorted(row for row in range(len(lengths)) if not whole_idle(batch, row))
    assert got["computed_sequences"] == len(used)
    assert got["computed_tokens"] == sum(lengths[row] for row in used)
    assert set(objectives[0].totals) == set(objectives[1].totals)
    torch.testing.assert_close(parts.executor.model.table, whole.executor.model.table, atol=1e-6, rtol=1e-6)
    scores = whole.forward(batch, entropy=True)
    scored = whole.forward(part, entropy=True)
    for key in ("log_probs", "entropy"):
        for place, row in enumerate(order):
            torch.testing.assert_close(scored[key][place], scores[key][row])


def whole_idle(batch: TensorDict, row: int) -> bool:
    return not bool((batch["advantages"][row] * batch["loss_mask"][row]).any())


def test_all_rows_are_computed_where_the_configuration_or_the_model_asks_for_it() -> None:
    batch = batch_of([3, 4, 5, 6], idle=(1, 3))
    assert build().train_batch(batch, Weighted())["computed_sequences"] == 2
    assert build(skip_zero_gradient_rows=False).train_batch(batch, Weighted())["computed_sequences"] == 4
    built = build()
    built.executor.adds_loss, built.executor.auxiliary = True, 0.25
    want = by_hand(built.executor.model, batch)[0]
    table = built.executor.model.table.sum().item()
    result = built.train_batch(batch, Weighted())
    assert result["computed_sequences"] == 4
    assert result["auxiliary_loss"] == pytest.approx(0.25 * table)
    assert result["loss"] == pytest.approx(want + 0.25 * table)


def test_a_dummy_takes_the_place_of_rows_that_are_left_out() -> None:
    """All rows idle in parts: one micro-batch of one token, whose loss is connected to the table all the same."""
    batch = batch_of([3, 4], idle=(0, 1))
    built = build()
    result = built.train_batch(LocalBatch(batch, (0, 1), (3, 4)), Weighted())
    assert (result["loss"], result["grad_norm"], result["step"]) == (0.0, 0.0, 1.0)
    assert (result["computed_sequences"], result["computed_tokens"]) == (0.0, 0.0)
    (only,) = built.executor.seen
    assert only.dummy
    assert only.packed.num_tokens == 1
    assert not only.wanted.any()
    assert not only.packed.values["loss_mask"].any()


def test_the_rate_follows_the_steps_that_were_made() -> None:
    config: dict[str, Any] = {"lr_schedule": "linear", "total_steps": 4, "on_nonfinite": "skip"}
    built = build(**config)
    batch = batch_of([4, 5])
    wanted = EngineConfig(device="cpu", lr=LR, **config)

    class Bad(Weighted):
        def __call__(self, *args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            return super().__call__(*args)[0] * math.inf, {}

    seen = []
    for objective in (Weighted(), Bad(), Weighted(), Weighted()):
        result = built.train_batch(batch, objective)
        seen.append((result["lr"], result["step"], result["skipped"], result["skipped_steps"]))
    rate = [learning_rate(wanted, step) for step in range(3)]
    assert seen == [(rate[0], 1, 0, 0), (rate[1], 1, 1, 1), (rate[1], 2, 0, 1), (rate[2], 3, 0, 1)]


def test_a_loss_that_is_not_finite_reaches_no_optimizer() -> None:
    """Even where the executor would make a step of it: the gradient is finite here, the loss is not."""

    class Infinite(Weighted):
        def __call__(self, *args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, metrics = super().__call__(*args)
            return loss + math.inf, metrics

    built = build()
    before = built.executor.model.table.detach().clone()
    with pytest.raises(NonFiniteError, match="step 1: the loss is inf"):
        built.train_batch(batch_of([4, 5]), Infinite())
    assert torch.equal(built.executor.model.table, before)


def test_saved_and_loaded(tmp_path: Path) -> None:
    built, other = build(on_nonfinite="skip"), build(on_nonfinite="skip")
    batch = batch_of([4, 5])
    built.train_batch(batch, Weighted())
    built.guard.skipped = 3
    built.save(tmp_path / "one")
    metadata, _ = read_manifest(tmp_path / "one")
    assert metadata.pop("recheck_waited") is None, "no batch was checked"
    assert metadata == {"step": 1, "skipped_steps": 3, "world_size": 1, "optimizer": False, "extra": {}}
    other.load(tmp_path / "one")
    assert (other.step, other.guard.skipped) == (1, 3)
    assert torch.equal(other.executor.model.table, built.executor.model.table)
    assert other.train_batch(batch, Weighted()) == built.train_batch(batch, Weighted())


@pytest.mark.parametrize("wait", [True, False])
def test_a_checkpoint_under_further_names_is_the_same(tmp_path: Path, wait: bool) -> None:
    built = build()
    built.train_batch(batch_of([4, 5]), Weighted())
    names = [tmp_path / name for name in ("one", "two", "three")]
    names[2].mkdir()
    (names[2] / "earlier").write_text("of the last save")
    built.save(names[0], {"cursor": 3}, wait, [names[1], str(names[2])])
    built.wait_for_saves()
    files = {path.name: path.read_bytes() for path in names[0].iterdir()}
    assert files
    for name in names:
        assert {path.name: path.read_bytes() for path in name.iterdir()} == files
        other = build()
        assert other.load(name) == {"cursor": 3}
        assert other.step == 1
        assert torch.equal(other.executor.model.table, built.executor.model.table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "three", "two"]


class Rows(Weighted):
    def __call__(self, log_probs: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return log_probs, {}


def test_refusals() -> None:
    batch, built = batch_of([4, 5]), build()
    with pytest.raises(ValueError, match="the batch lacks advantages; it has group, input_ids, loss_mask"):
        built.train_batch(batch.exclude("advantages"), Weighted())
    with pytest.raises(ValueError, match="the batch lacks loss_mask"):
        built.train_batch(batch.exclude("loss_mask"), Weighted())
    with pytest.raises(ValueError, match="no token of the batch is trained"):
        built.train_batch(batch_of([1, 1]), Weighted())
    with pytest.raises(ValueError, match="an objective must return a scalar loss, its shape is \\(9,\\)"):
        built.train_batch(batch, Rows())
    with pytest.raises(ValueError, match="it can only score"):
        build(trainable=False).train_batch(batch, Weighted())
    with pytest.raises(ValueError, match="SimpleNamespace is no objective, it lacks needs_entropy"):
        built.train_batch(batch, SimpleNamespace(required_keys=()))
    with pytest.raises(ValueError, match=r"13.*12|12.*13"):
        build(12).plan([13])
    assert build(12).plan([12]).num_micro_batches == 1


def test_a_rank_that_lacks_a_row_is_named() -> None:
    batch = batch_of([4, 5])
    part = LocalBatch(view_batch(batch).select([1]), (1,), (4, 5))
    calls: list[Callable[[], Any]] = [
        lambda: build().train_batch(part, Weighted()),
        lambda: build().forward(part),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"rank 0 of the plan lacks a row .*plan\(lengths\)\.rows_of\(rank\)"):
            call()


def test_offloaded_engines_do_nothing_else(tmp_path: Path) -> None:
    built = build()
    batch = batch_of([4, 5])
    built.offload()
    calls: list[Callable[[], Any]] = [
        lambda: built.train_batch(batch, Weighted()),
        lambda: built.forward(batch),
        lambda: built.export_weights(),
        lambda: built.save(tmp_path / "a"),
        lambda: built.load(tmp_path / "a"),
        lambda: built.save_hf(tmp_path / "a"),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"offloaded: call onload\(\) first"):
            call()
    built.onload()
    built.forward_backward(batch, Weighted())  # whose gradient would be lost
    for lost in (lambda: built.train_batch(batch, Weighted()), lambda: built.save(tmp_path / "a"), built.offload):
        with pytest.raises(ValueError, match=r"would lose the gradient of forward_backward: call optimizer_step"):
            lost()
    with pytest.raises(ValueError, match="optimizer_step has no beta1; it takes lr, betas, eps, weight_decay, grad_cl"):
        built.optimizer_step(beta1=0.9)
    with pytest.raises(ValueError, match="lr must"):
        built.optimizer_step(lr=-1.0)
    with pytest.raises(ValueError, match="an objective must return a scalar loss"):
        built.forward_backward(batch, Rows())
    with pytest.raises(ValueError, match="there is no gradient to step by: call forward_backward first"):
        built.optimizer_step()
    assert built.executor.places == [torch.device("cpu"), built.device]
    assert built.train_batch(batch, Weighted())["step"] == 1
