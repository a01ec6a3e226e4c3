"""What a step's episodes were like, as numbers: what people look at first."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from statistics import fmean, pstdev

import torch

from rollout.chat.segment import NOT_SAMPLED
from rollout.episodes.summary import AnyEpisode

TRUNCATED = frozenset({"limit", "length", "max_turns", "max_tokens", "deadline"})
"""Ends that a limit brought about."""
RATES = ("errors", "timeouts")


def episode_metrics(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Return length, truncation, entropy, spread and components of rewards, and rates of tools, by `runlog`'s names.

    `entropy` is the mean of -log p over the sampled tokens: unbiased for the entropy a token of the policy that sampled
    them, as answers are drawn from the whole vocabulary. Failed episodes count in `response/failed` alone.
    """
    played = [episode for episode in episodes if episode.score is not None]
    metrics = {"response/failed": 1 - len(played) / len(episodes)}
    if not played:
        return metrics
    lengths = [episode.sampled for episode in played]
    metrics |= {
        "response/length": fmean(lengths),
        "response/length_max": float(max(lengths)),
        "response/truncated": fmean([episode.end in TRUNCATED for episode in played]),
        "response/turns": fmean([episode.metrics.get("turns", 1) for episode in played]),
    }
    if sampled := sum(lengths):
        nll = math.fsum(segment.nll for episode in played for segment in episode.segments)
        metrics["entropy"] = nll / sampled
    metrics["reward/std"] = fmean([_spread(tuple(rewards)) for rewards in _by_group(played).values()])
    metrics |= _means(
        "reward/part/", (episode.score.reward_components for episode in played if episode.score is not None)
    )
    return metrics | tool_metrics(played)


def environment_metrics(
    episodes: Sequence[AnyEpisode], environment_of: Callable[[str], str | None], prefix: str = "reward/environment/"
) -> dict[str, float]:
    """Return the mean reward of each environment under `prefix`, and its share of the episodes; nothing where a run has
    one.

    `environment_of`: a task's environment by its id, None where a run has one alone.
    """
    rewards: dict[str, list[float]] = {}
    for episode in episodes:
        name = environment_of(episode.task_id)
        if episode.score is not None and name is not None:
            rewards.setdefault(name, []).append(episode.reward)
    total = sum(map(len, rewards.values()))
    metrics = {f"{prefix}{name}": fmean(values) for name, values in sorted(rewards.items())}
    return metrics | {f"{prefix}{name}/share": len(values) / total for name, values in sorted(rewards.items())}


def tool_metrics(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Return for each tool its calls an episode, and the shares of them that failed and that took too long.

    An episode's metrics count them, as `tool/NAME/calls`, `tool/NAME/errors`, `tool/NAME/timeouts`.
    """
    totals: dict[str, float] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            if name.startswith("tool/"):
                totals[name] = totals.get(name, 0.0) + value
    metrics: dict[str, float] = {}
    for name, calls in sorted(totals.items()):
        if name.endswith("/calls"):
            tool = name.removesuffix("/calls")
            metrics[name] = calls / len(episodes)
            metrics |= {f"{tool}/{rate}": totals.get(f"{tool}/{rate}", 0.0) / calls for rate in RATES if calls}
    return metrics


@lru_cache(maxsize=1024)
def _spread(rewards: tuple[float, ...]) -> float:
    """Return `pstdev`, which counts in fractions: groups of rewards of 0 and 1 come again."""
    return pstdev(rewards)


def _by_group(episodes: Iterable[AnyEpisode]) -> dict[int, list[float]]:
    groups: dict[int, list[float]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode.reward)
    return groups


def _means(prefix: str, rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each name over the rows that have it."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            by_name.setdefault(name, []).append(value)
    return {prefix + name: fmean(values) for name, values in sorted(by_name.items())}


def age_metrics(episodes: Sequence[AnyEpisode], version: int) -> dict[str, float]:
    """Return how old the trained tokens are by the weights that train them, number `version`."""
    sampled = [
        [(version - v, count) for v, count in segment.spans if v != NOT_SAMPLED]
        for episode in episodes
        for segment in episode.segments
    ]
    ages = [age for spans in sampled for age in spans]
    tokens = max(1, sum(count for _, count in ages))
    interrupted = sum(len({age for age, _ in spans}) > 1 for spans in sampled)
    return {
        "schedule/token_staleness": sum(max(0, age) * count for age, count in ages) / tokens,
        "schedule/stale_tokens": sum(count for age, count in ages if age > 0) / tokens,
        "schedule/interrupted_answers": interrupted / max(1, len(sampled)),
    }


def rollout_metrics(episodes: Sequence[AnyEpisode], environment_of: Callable[[str], str | None]) -> dict[str, float]:
    """Return what a step's episodes were like, and how many tokens they have."""
    segments = [segment for episode in episodes for segment in episode.segments]
    metrics = reward_metrics(episodes) | episode_metrics(episodes) | environment_metrics(episodes, environment_of)
    if segments:
        metrics["rollout/policy_version"] = float(max(version for s in segments for version, _ in s.spans))
    return metrics | {
        "rollout/episodes": float(len(episodes)),
        "rollout/tokens": float(sum(s.length for s in segments)),
        "rollout/sampled_tokens": float(sum(s.sampled for s in segments)),
        "rollout/failed_episodes": float(sum(episode.error is not None for episode in episodes)),
        "rollout/retried_episodes": float(sum(episode.attempt > 0 for episode in episodes)),
    }


def reward_metrics(episodes: Sequence[AnyEpisode]) -> dict[str, float]:
    """Return mean, least and largest reward of the episodes that were scored; the shares of groups that solve their
    task, and that teach. Nothing where all episodes failed."""
    groups: dict[int, list[float]] = {}
    for episode in episodes:
        if episode.error is None:
            groups.setdefault(episode.group, []).append(episode.reward)
    if not groups:
        return {}
    low, high = (torch.tensor([choose(rewards) for rewards in groups.values()]) for choose in (min, max))
    return {
        "reward": torch.tensor([reward for rewards in groups.values() for reward in rewards]).mean().item(),
        "reward/min": low.min().item(),
        "reward/max": high.max().item(),
        "reward/solved_groups": (low > 0).float().mean().item(),
        "reward/mixed_groups": (low < high).float().mean().item(),
    }
