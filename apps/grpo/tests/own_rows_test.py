"""Ranks that get the rows that they train, beside ranks that get all of them: the same batches, to the bit, and steps.

Real processes of a gloo group. The episodes are sampled here and there, of uneven lengths, some without a signal.
"""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from apps.grpo.config import GrpoConfig
from apps.grpo.step import GrpoTrainer, whole_batch_reason
from apps.grpo.testing.recipe import RECIPE
from engines import EngineConfig, LocalBatch, TrainEngine, build_engine
from engines.prove.forked_ranks import launch_forked
from engines.tiny import tiny_model
from objectives import GRPO
from rollout import Episode, Score, Segment
from schedules.rows import shared
from schedules.rows.shared import fetch_all, gather_episodes
from seqpack import index_select
from seqpack.comm.collectives import gather_plain
from seqpack.comm.row_plan import RowPlan

BASE = replace(RECIPE.config, prompts_per_step=8, group_size=4)
CASES: dict[str, tuple[GrpoConfig, dict[str, Any]]] = {
    "plain": (BASE, {}),
    "replicas": (BASE, {"shard_ranks": 1}),
    "all rows": (BASE, {"skip_zero_gradient_rows": False}),
    "several updates": (replace(BASE, epochs=2, mini_batches=3, objective=GRPO(kl_coef=0.1)), {}),
    "shared sequences": (replace(BASE, mini_batches=2), {"context_parallel": "static:2"}),
    "whole": (replace(BASE, objective=GRPO(policy_loss="clip_cov")), {}),
}
EXACT = ("plain", "replicas", "all rows", "whole")
"""Those in which nothing is scored before: a row's neighbours in a micro-batch are the same then."""


def made(seed: int = 0) -> list[Episode]:
    """Eight groups of four, one episode failed, one of two streams; every third group has no signal."""
    draw, episodes = random.Random(seed), []
    for number in range(32):
        group, streams = number // 4, []
        for _ in range(2 if number == 5 else 1):
            count = draw.randrange(4, 24)
            mask = [False, False, *(draw.random() < 0.8 for _ in range(count - 2))]
            streams.append(
                Segment(
                    tuple(draw.randrange(64) for _ in mask),
                    tuple(mask),
                    tuple(-draw.random() if on else 0.0 for on in mask),
                    tuple(0 if on else -1 for on in mask),
                )
            )
        failed = number == 9
        score = Score(0.5 if group % 3 == 0 else draw.choice([0.0, 1.0, 0.25]))
        end: Any = "failed" if failed else "done"
        messages = ({"role": "user", "content": f"question {group}"},)
        episodes.append(
            Episode(
                f"{number}",
                f"task {group}",
                0,
                tuple(streams),
                None if failed else score,
                end,
                {"total_s": 1.0},
                "lost" if failed else None,
                messages,
                {"turns": 1.0},
                group,
            )
        )
    return episodes


def built(options: dict[str, Any], config: GrpoConfig) -> TrainEngine:
    settings = EngineConfig(
        device="cpu", lr=1e-2, eps=1e-3, max_tokens_per_rank=48, **{"skip_zero_gradient_rows": True, **options}
    )
    engine = build_engine(settings, tiny_model(num_hidden_layers=2, vocab_size=64))
    if config.objective.kl_coef:
        model = tiny_model(seed=3, num_hidden_layers=2, vocab_size=64)
        engine.reference = build_engine(settings, model, trainable=False)
    return engine


def recorded(engine: TrainEngine) -> list[Any]:
    """The batches that an engine is given from now on."""
    given, real = [], engine.train_batch

    def train_batch(batch: Any, objective: Any) -> Any:
        given.append(batch)
        return real(batch, objective)

    engine.train_batch = train_batch  # type: ignore[method-assign]
    return given


def same_rows(local: Any, whole: Any) -> bool:
    """Whether the rows that a rank was given are those of the whole batch, to the bit, in every column but scores."""
    if not isinstance(local, LocalBatch):
        return all(torch.equal(local["input_ids"][n], row) for n, row in enumerate(whole["input_ids"].unbind()))
    expected, held = index_select(whole, local.rows), local.batch
    assert isinstance(held, TensorDict)
    assert set(held.keys()) == set(expected.keys())
    return all(
        torch.equal(mine, other)
        for key in sorted(set(expected.keys()) - {"old_log_probs", "ref_log_probs"})
        for mine, other in zip(held[key].unbind(), expected[key].unbind(), strict=True)
    )


def both(case: str) -> list[dict[str, Any]]:
    """What each rank found, training two steps each way."""
    config, options = CASES[case]
    rank, world = dist.get_rank(), dist.get_world_size()
    plans: list[RowPlan] = []
    real = shared.exchange_rows  # type: ignore[attr-defined]

    def noted(plan: RowPlan, own: Any, group: Any = None) -> Any:
        plans.append(plan)
        return real(plan, own, group)

    whole, own = (GrpoTrainer(config, built(options, config)) for _ in range(2))
    batches = [recorded(trainer.engine) for trainer in (whole, own)]
    found: dict[str, Any] = {"same": True, "metrics": []}
    for step in range(2):
        episodes = made(step)
        mine = [episode for episode in episodes if (episode.group + step) % world == rank]
        known = sorted(gather_episodes(mine), key=lambda episode: episode.group)
        assert fetch_all(known) == episodes
        shared.exchange_rows = noted  # type: ignore[attr-defined]
        results = whole.train(step, episodes), own.train(step, known)
        shared.exchange_rows = real  # type: ignore[attr-defined]
        assert results[0].advantages == results[1].advantages
        found["metrics"].append([result.metrics for result in results])
    found["same"] = all(same_rows(*pair) for pair in zip(batches[1], batches[0], strict=True))
    found["held"] = [list(batch.rows) for batch in batches[1] if isinstance(batch, LocalBatch)]
    found["sent"] = [plan.total_bytes for plan in plans]
    exports = [{p.name: p.flat.clone() for p in t.engine.export_weights(max_bytes=2**40)} for t in (whole, own)]
    found["weights"] = max(float((exports[0][name] - x).abs().max()) for name, x in exports[1].items())
    return gather_plain(found)


@pytest.mark.parametrize("case", [*CASES])
@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_gets_its_rows_trains_as_one_that_gets_all(case: str, world: int) -> None:
    config, options = CASES[case]
    for found in launch_forked(both, (case,), world_size=world):
        assert found["same"]
        for whole, own in found["metrics"]:
            assert own["train/updates"] == whole["train/updates"]
            if case in EXACT:
                assert own == whole
            for name, value in whole.items():
                if name not in ("train/plan_hash", "train/fill", "train/micro_batches"):
                    assert own[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
        assert found["weights"] <= (0 if case in EXACT else 2e-5)
    copies = world if whole_batch_reason(config) else 2 if "context_parallel" in options else 1
    standing_by = 200 * world * config.mini_batches  # a rank without rows holds the shortest
    messages = 200 * 32 * world * bool(whole_batch_reason(config))
    for step, sent in enumerate(found["sent"]):
        sizes = [segment.length for episode in made(step) for segment in episode.segments]
        assert sent <= copies * 8 * (sum(sizes) + len(sizes)) + standing_by + messages


def test_each_row_is_held_where_it_is_trained_and_rows_without_a_signal_nowhere() -> None:
    ranks = launch_forked(both, ("plain",), world_size=4)
    for step in range(2):
        held = sorted(row for found in ranks for row in found["held"][step])
        assert len(held) == len(set(held))
        episodes = [episode for episode in made(step) if episode.score is not None]
        rows = [episode for episode in episodes for _ in episode.segments]
        groups = {rows[row].group for row in held}
        assert groups.isdisjoint({0, 3, 6})


def test_what_every_rank_needs_is_said() -> None:
    assert whole_batch_reason(BASE) is None
    assert "chooses among all tokens" in str(whole_batch_reason(CASES["whole"][0]))
