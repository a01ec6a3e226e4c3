"""Why a step of GRPO trained nothing, from its episodes and its metrics."""

from collections.abc import Sequence

from objectives import GRPO
from objectives.losses import POLICY_LOSSES
from rollout import Task, TaskRow
from rollout.episodes.summary import AnyEpisode
from runlog.notices import NOT_CALLED
from schedules.protocols import Tasks
from schedules.reporting.episode_metrics import TRUNCATED

SIGNAL = "train/nonzero_advantages"
"""The share of trained tokens whose advantage is not 0."""

LIMITS = {
    "length": "--sampling.max-new-tokens",
    "max_tokens": "--max-episode-tokens",
    "max_turns": "--max-turns",
    "deadline": "--max-episode-seconds",
}
"""The flags of the run's own limits, by the ends that they bring about."""


def idle_reason(
    episodes: Sequence[AnyEpisode], metrics: dict[str, float], objective: GRPO, advantage: str
) -> str | None:
    """Return why no reward changed the policy in a step, with the counts; None where one did.

    A KL penalty and an entropy bonus teach nothing by themselves, and do not count. A policy loss of a user that needs
    no advantage does.
    """
    scored = [episode for episode in episodes if episode.score is not None]
    if not metrics["train/updates"]:
        if not scored:
            return f"every episode failed ({len(episodes)} episodes)"
        return f"no token of {len(scored)} responses is trained: their loss masks are empty"
    if metrics.get("train/skipped") == 1:
        return "loss or gradient was not finite, and the update was skipped"
    scales = POLICY_LOSSES.named(objective.policy_loss).scales_with_advantage
    if scales and not metrics[SIGNAL]:
        return _without_advantages(scored, metrics, advantage)
    if metrics.get("train/grad_norm") != 0:
        return None
    if metrics.get("train/off_policy/weight") == 0:
        return f"off-policy weights are 0 for every token (--objective.off-policy {objective.off_policy})"
    return "the gradient is 0, although advantages are not"


def _without_advantages(scored: Sequence[AnyEpisode], metrics: dict[str, float], advantage: str) -> str:
    """Return why every advantage is 0."""
    groups: dict[int, set[float]] = {}
    for episode in scored:
        groups.setdefault(episode.group, set()).add(episode.reward)
    rewards = set.union(*groups.values())
    if any(len(values) > 1 for values in groups.values()):
        return f"every advantage is 0, although rewards in a group differ (--advantage {advantage})"
    if len(rewards) == 1:
        same = f"every reward was {rewards.pop():g} ({len(scored)} responses)"
    else:
        same = f"in each of {len(groups)} groups all rewards were equal ({len(scored)} responses)"
    if all(episode.end in TRUNCATED for episode in scored):
        uncalled = NOT_CALLED if metrics.get("reward/called") == 0 else ""
        fixes = sorted({LIMITS[episode.end] for episode in scored if episode.end in LIMITS})
        fix = f" (raise {', '.join(fixes)})" if fixes else ""
        same = f"{same}, and every response was cut off by a limit{uncalled}{fix}"
    return same


def reward_called(episodes: Sequence[AnyEpisode], rows: Sequence[TaskRow], tasks: Tasks) -> dict[str, float]:
    """Return {"reward/called": 0} where the tasks' reward function has scored none of the episodes, else nothing.

    A task's function is not called for a response that a limit cut off, unless it takes that as an argument
    (`rollout.Task.cut_off_reward`). `rows`: the task of each group.
    """
    if not rows or not all(episode.end in TRUNCATED for episode in episodes):
        return {}
    factories = (tasks.environment(rows[group]) for group in {episode.group for episode in episodes})
    fixed = all(isinstance(factory, Task) and factory.cut_off_reward is not None for factory in factories)
    return {"reward/called": 0.0} if fixed else {}
