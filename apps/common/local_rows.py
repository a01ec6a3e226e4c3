"""The rows of a step that this rank trains, where episodes lie on several ranks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensordict import TensorDict

from engines import LocalBatch, TrainEngine, base_policy
from engines.protocol import Batch
from objectives.advantages import COMPONENTS, ESTIMATORS, LENGTH, TOKEN_REWARDS, WEIGHTS
from rollout.episodes.row_batch import rows_to_batch
from rollout.episodes.summary import EpisodeSummary
from schedules.rows.shared import fetch_rows
from schedules.runtime.collectives import rank_and_world
from seqpack import Objective
from seqpack.batches.jagged import is_jagged, ragged
from seqpack.batches.view import BatchView

KNOWN = frozenset({"reward", "group", "episode", "episode_tokens", LENGTH, COMPONENTS, WEIGHTS, TOKEN_REWARDS})
"""What an estimator of advantages may read of all rows besides `loss_mask`, so that no token of others is needed."""


def reads_tokens(advantage: str) -> bool:
    """Return whether an estimator of advantages may read the tokens of all rows: a whole batch, or other keys."""
    estimator = ESTIMATORS.named(advantage)
    return "batch" in estimator.inputs or not KNOWN.issuperset(estimator.keys)


def reason_of(teachers: bool, kl_in_reward: float, policy_loss: str, advantage: str) -> str | None:
    """Return why every rank needs the tokens of all rows; None where these settings need none but its own."""
    if teachers:
        return "teachers score them"
    if kl_in_reward:
        return "--kl-in-reward is of all tokens"
    if policy_loss in ("clip_cov", "kl_cov"):
        return f"--objective.policy-loss {policy_loss} chooses among all tokens"
    return f"--advantage {advantage} may read them" if reads_tokens(advantage) else None


def whole_batch_line(reason: str | None) -> str | None:
    """Return what a run of several ranks says once where each gets all rows; None where it gets its own."""
    if reason is None or rank_and_world()[1] == 1:
        return None
    return f"rows: every rank gets all of them, as {reason}; else it gets those that it trains"


def outline_view(outline: TensorDict) -> BatchView:
    """Return the view of an outline (`row_outline`), which has no tokens."""
    columns = {key: ragged(x) if is_jagged(x) else x for key, x in outline.items()}
    return BatchView(tuple(columns["loss_mask"].lengths), columns, outline["reward"].device)


def local_batches(
    outline: TensorDict,
    episodes: Sequence[EpisodeSummary],
    parts: Sequence[Sequence[int]],
    engine: TrainEngine,
    objective: Objective,
    compared: tuple[bool, bool] = (False, False),
) -> list[LocalBatch]:
    """Return the batch of each update as this rank holds it: the rows that it trains, with the outline's columns.

    Each of these rows comes from the rank that sampled it, once. Rows without a gradient stay where they are.
    Collective. `parts`: the rows of each update; the outline has `advantages`. `compared`: see `add_log_probs`.
    """
    view, (rank, world) = outline_view(outline), rank_and_world()
    wanted, planned = [set[int]() for _ in range(world)], []
    for part in parts:
        lengths = tuple(view.lengths[row] for row in part)
        stats = engine.row_stats(view.select(part), objective)
        by_rank = engine.rows_by_rank(engine.plan(lengths, stats.zero_gradient))
        for needed, rows in zip(wanted, by_rank, strict=True):
            needed.update(part[row] for row in rows)
        planned.append((part, by_rank[rank], lengths, stats))
    tensors = fetch_rows(episodes, wanted)
    batches = [
        LocalBatch(rows_to_batch(episodes, outline, [part[row] for row in rows], tensors), rows, lengths, stats)
        for part, rows, lengths, stats in planned
    ]
    for batch in batches:
        add_log_probs(batch.batch, batch, engine, *compared)
    return [replace(batch) for batch in batches]  # with what was scored


def add_log_probs(batch: Any, given: Batch, engine: TrainEngine, old: bool, reference: bool) -> None:
    """Add the log-probs that the updates of a batch compare with to it; `given`: the batch as the engine takes it.

    Collective. `old`: of the policy as it is now, where later updates of the batch are off-policy; `reference`: of the
    reference model, unless they are there.
    """
    if old:
        batch["old_log_probs"] = engine.forward(given)["log_probs"]
    if reference and "ref_log_probs" not in batch.keys():  # noqa: SIM118
        with base_policy(engine) as base:
            batch["ref_log_probs"] = base.forward(given)["log_probs"]
