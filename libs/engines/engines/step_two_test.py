"""Two gloo processes equal one, over every executor: curves, scores, checkpoints. One start for all cases."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from engines import EngineConfig, LocalBatch, build_engine
from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.plain_executor import build_plain_engine
from engines.protocol import Batch
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack import Objective, index_select
from seqpack.batches.batch import jagged

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]
STEPS = 3
KINDS = ["dense", "moe"]
BUILD: dict[str, Callable[..., Any]] = {"fsdp2": build_engine, "plain": build_plain_engine}
OBJECTIVE = GRPO(off_policy="mask")
IDLE_ROWS = {1, 4, 5, 8}


def engine(kind: str = "dense", seed: int = 0, executor: str = "fsdp2", **options: Any) -> Any:
    config = EngineConfig(
        **{"device": "cpu", "lr": 1e-2, "eps": 1e-3, "max_tokens_per_rank": 20, "weight_decay": 0.1, **options}
    )
    return BUILD[executor](config, tiny_model(kind, seed=seed, scale=2.0, num_hidden_layers=2))


def weights(built: Any) -> dict[str, torch.Tensor]:
    return {part.name: part.flat.clone() for part in built.export_weights(max_bytes=2**40)}


def curve(built: Any, objective: Objective, steps: Iterable[int] = range(STEPS)) -> list[dict[str, float]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), objective) for step in steps]


def added(built: Any) -> list[dict[str, float]]:
    """An update by the gradients of two batches."""
    found = [built.forward_backward(tiny_batch(LENGTHS, seed=seed), SFT()) for seed in (7, 8)]
    return [*found, built.optimizer_step(lr=5e-3, grad_clip=0.3)]


def batch_with_idle_rows(seed: int) -> TensorDict:
    """`IDLE_ROWS` have no advantage: they need not be computed, and their groups count all the same."""
    batch = tiny_batch(LENGTHS, seed=seed)
    rows = enumerate(batch["advantages"].unbind())
    batch["advantages"] = jagged([row * (i not in IDLE_ROWS) for i, row in rows])
    return batch


def own_rows(built: Any, batch: TensorDict, order: int = 1) -> LocalBatch:
    """What the plan gives this rank, and nothing else."""
    lengths = [len(row) for row in batch["input_ids"].unbind()]
    rows = built.plan(lengths).rows_of(dist.get_rank())[::order]
    return LocalBatch(index_select(batch, list(rows)), rows, tuple(lengths))


def known_rows(
    built: Any, batch: TensorDict, order: int = 1, objective: Objective = OBJECTIVE, of: int | None = None
) -> LocalBatch:
    """What the plan without idle rows gives a rank (this one), where every rank knows the counts of all rows."""
    lengths = [len(row) for row in batch["input_ids"].unbind()]
    stats = built.row_stats(batch, objective)
    rows = built.rows_by_rank(built.plan(lengths, stats.zero_gradient))[dist.get_rank() if of is None else of][::order]
    return LocalBatch(index_select(batch, list(rows)), rows, tuple(lengths), stats)


def parts(executor: str) -> dict[tuple[str, str], Any]:
    """Steps and scores from whole batches and from each rank's own rows."""
    out: dict[tuple[str, str], Any] = {}
    ways = {"whole": lambda built, batch, order=1: batch, "parts": own_rows, "known": known_rows}
    for how, give in ways.items():
        built = engine(executor=executor)
        batches = [batch_with_idle_rows(seed) for seed in range(STEPS)]
        out[how, "curve"] = [built.train_batch(give(built, batch, -1), OBJECTIVE) for batch in batches]
        out[how, "lonely"] = [built.train_batch(give(built, tiny_batch([9]), 1), SFT())]
        out[how, "weights"] = weights(built)
        batch = batches[0]
        part = give(built, batch)
        scored = built.forward(part, entropy=True)
        rows = range(len(LENGTHS)) if how == "whole" else part.rows
        out[how, "scores"] = {row: [scored[key][i] for key in scored.keys()] for i, row in enumerate(rows)}  # noqa: SIM118
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, out[how, "scores"])
        out[how, "scores"] = [dict(rows) for rows in everyone]
    return out


def refused(built: Any, batch: Batch, objective: Objective | None = None) -> str:
    try:
        built.train_batch(batch, objective) if objective else built.forward(batch)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def refusals() -> list[Any]:
    """What each rank says; gathered, so that every rank is seen to end."""
    rank, batch = dist.get_rank(), tiny_batch([5, 6, 7, 8])
    lengths = (5, 6, 7, 8)

    def part(rows: Any, lengths: tuple[int, ...] = lengths, source: TensorDict = batch) -> LocalBatch:
        return LocalBatch(index_select(source, list(rows)), rows, lengths)

    other = batch.clone()
    other["loss_mask"] = jagged([torch.arange(n) >= n - 1 for n in lengths])
    said = {
        "lengths": refused(engine(), tiny_batch([5, 6 + rank]), SFT()),
        "masks": refused(engine(), other if rank else batch, SFT()),
        "kinds": refused(engine(), part(range(4)) if rank else batch, SFT()),
        "lacking": refused(engine(), part((0,)) if rank else part(range(4)), SFT()),
        "scores": refused(engine(), part((0,)) if rank else part(range(4))),
        "known": refused(engine(), known_rows(engine(), batch, objective=SFT()) if rank else batch, SFT()),
        "held": refused(engine(), known_rows(engine(), batch, objective=SFT(), of=0), SFT()),
        "numbers": refused(engine(), part(range(4), source=other if rank else batch), SFT()),
    }
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    return everyone


def cases(folder: Path, world: int) -> dict[Any, Any]:
    """Everything that is compared, as plain data; runs the same in a world of any size."""
    out: dict[Any, Any] = {}
    for kind in KINDS:
        built = engine(kind)
        out[kind, "curve"] = curve(built, GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask")) + added(built)
        out[kind, "weights"] = weights(built)
    plain = engine(executor="plain")
    out["plain", "curve"] = curve(plain, GRPO(kl_coef=0.1, entropy_coef=0.01, off_policy="mask")) + added(plain)
    out["plain", "weights"] = weights(plain)
    plain.save(folder / f"plain{world}")
    out["plain resumed", "curve"] = curve(plain, SFT(), range(2, 4))
    padded = engine(batching="padded")
    out["padded", "curve"] = curve(padded, SFT(aggregation="sequence"))
    # Fewer rows than ranks: one rank stands by with nothing to train.
    lonely = engine()
    out["lonely", "curve"] = [lonely.train_batch(tiny_batch([9]), SFT()) for _ in range(2)]
    scored = lonely.forward(tiny_batch(LENGTHS), entropy=True)
    out["scores"] = [scored[key].values() for key in ("log_probs", "entropy")]
    saved = engine()
    curve(saved, SFT(), range(2))
    saved.save(folder / f"world{world}")
    out["resumed", "curve"] = curve(saved, SFT(), range(2, 4))
    saved.save_hf(folder / f"hf{world}")
    out["hf", "weights"] = weights(saved)
    return out


def two_ranks(folder: Path, other: None) -> dict[Any, Any]:
    out = cases(folder, 2)
    across = engine(seed=3)
    across.load(folder / "world1")
    out["across"] = curve(across, SFT(), range(2, 4))
    across = engine(seed=3)
    across.load(folder / "plain1")
    out["across executors"] = curve(across, SFT(), range(2, 4))
    for executor in BUILD:
        out["parts", executor] = parts(executor)
    out["refusals"] = refusals()
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    folder = tmp_path_factory.mktemp("worlds")
    made = ensure_group("cpu")
    one = cases(folder, 1)
    back = None
    if made:
        dist.destroy_process_group()
    two = launch_forked(two_ranks, (folder, None), world_size=2)
    ensure_group("cpu")
    loaded = engine(seed=4)
    loaded.load(folder / "world2")
    back = curve(loaded, SFT(), range(2, 4))
    yield one, two, back, folder
    dist.destroy_process_group()


def assert_same_curve(one: list[dict[str, float]], two: list[dict[str, float]]) -> None:
    for left, right in zip(one, two, strict=True):
        for key in left:
            if key not in ("plan_hash", "micro_batches", "fill"):
                assert right[key] == pytest.approx(left[key], rel=2e-5, abs=1e-6), key


@pytest.mark.parametrize("kind", [*KINDS, "padded", "lonely", "resumed", "plain", "plain resumed"])
def test_same_curve(results: tuple[Any, ...], kind: str) -> None:
    one, two, *_ = results
    assert_same_curve(one[kind, "curve"], two[kind, "curve"])


def test_the_ranks_shared_the_work(results: tuple[Any, ...]) -> None:
    one, two, *_ = results
    assert two["dense", "curve"][0]["micro_batches"] < one["dense", "curve"][0]["micro_batches"]


@pytest.mark.parametrize("kind", [*KINDS, "hf"])
def test_same_weights_after_training(results: tuple[Any, ...], kind: str) -> None:
    one, two, *_ = results
    for name, value in one[kind, "weights"].items():
        torch.testing.assert_close(two[kind, "weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_same_scores_on_every_rank(results: tuple[Any, ...]) -> None:
    one, two, *_ = results
    for left, right in zip(one["scores"], two["scores"], strict=True):
        torch.testing.assert_close(right, left, atol=1e-5, rtol=1e-5)


def test_checkpoints_move_between_world_sizes(results: tuple[Any, ...]) -> None:
    one, two, back, _ = results
    assert_same_curve(one["resumed", "curve"], two["across"])
    assert_same_curve(one["resumed", "curve"], back)


def test_hugging_face_directories_agree(results: tuple[Any, ...]) -> None:
    from safetensors.torch import load_file

    *_, folder = results
    left, right = (load_file(folder / f"hf{world}" / "model.safetensors") for world in (1, 2))
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, atol=1e-5, rtol=1e-5)


def test_executors_agree_on_two_ranks(results: tuple[Any, ...]) -> None:
    """Curves, weights, and a checkpoint of one that the other resumes from, written by another number of ranks."""
    one, two, *_ = results
    assert_same_curve(one["plain", "curve"], two["dense", "curve"])
    for name, value in one["plain", "weights"].items():
        torch.testing.assert_close(two["dense", "weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)
    assert_same_curve(one["plain resumed", "curve"], two["across executors"])


@pytest.mark.parametrize("executor", BUILD)
def test_ranks_that_hold_their_own_rows_give_the_whole_batchs_steps(results: tuple[Any, ...], executor: str) -> None:
    results_by_kind = results[1]["parts", executor]
    assert_same_curve(results_by_kind["whole", "curve"], results_by_kind["parts", "curve"])
    assert_same_curve(results_by_kind["whole", "lonely"], results_by_kind["parts", "lonely"])
    for name, value in results_by_kind["whole", "weights"].items():
        torch.testing.assert_close(results_by_kind["parts", "weights"][name], value, atol=1e-5, rtol=1e-5, msg=name)
    whole, local = results_by_kind["whole", "scores"][0], results_by_kind["parts", "scores"]
    assert sorted(row for rows in local for row in rows) == list(range(len(LENGTHS)))
    assert all(len(rows) < len(LENGTHS) for rows in local)
    for rows in local:
        for row, values in rows.items():
            for value, want in zip(values, whole[row], strict=True):
                torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("executor", BUILD)
def test_ranks_that_know_all_counts_make_the_whole_batchs_steps_to_the_bit(
    results: tuple[Any, ...], executor: str
) -> None:
    found = results[1]["parts", executor]
    assert found["known", "curve"] == found["whole", "curve"]
    assert found["known", "lonely"] == found["whole", "lonely"]
    for name, value in found["whole", "weights"].items():
        assert torch.equal(found["known", "weights"][name], value), name
    whole, known = found["whole", "scores"][0], found["known", "scores"]
    held = [row for rows in known for row in rows]
    assert len(held) == len(set(held))
    assert set(range(len(LENGTHS))) - set(held) == IDLE_ROWS  # nobody scores what nobody trains
    for rows in known:
        for row, values in rows.items():
            for value, want in zip(values, whole[row], strict=True):
                torch.testing.assert_close(value, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("lengths", "RuntimeError: ranks disagree on the plan"),
        ("masks", "RuntimeError: ranks disagree on the plan"),
        ("kinds", "RuntimeError: ranks disagree on the plan"),
        ("known", "RuntimeError: ranks disagree on the plan"),
        ("held", "ValueError: rank 1 of the plan lacks a row"),
        ("lacking", "ValueError: rank 1 of the plan lacks a row"),
        ("scores", "ValueError: rank 1 of the plan lacks a row"),
        ("numbers", "ValueError: ranks hold different rows under the number 0"),
    ],
)
def test_every_rank_says_what_does_not_fit(results: tuple[Any, ...], what: str, message: str) -> None:
    for said in results[1]["refusals"]:
        assert message in said[what]
