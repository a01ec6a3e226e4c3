"""Health of a run of reinforcement learning, from its last steps: each number with its threshold and what to change.

Every check reads the mean of a metric over the last `WINDOW` steps that have it, or compares it with the steps before.
The thresholds lie between healthy runs of the quickstart and runs that were made sick on purpose
(`apps/grpo/tests/health_test.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from runlog.display import shown

Row = Mapping[str, Any]
WINDOW = 3
"""Steps whose mean is judged; a run of fewer is not."""


@dataclass(frozen=True)
class Check:
    """A number of a run's last steps, the most (or least) that is healthy, and what to change."""

    name: str
    value: float
    limit: float
    change: str
    least: bool = False
    """Whether smaller numbers are the sick ones."""

    @property
    def healthy(self) -> bool:
        """Whether the number is on the right side of its threshold; NaN is not."""
        return self.value >= self.limit if self.least else self.value <= self.limit

    def __str__(self) -> str:
        """Return a line for the terminal."""
        side = "under" if self.least else "over"
        return f"{self.name} {shown(self.value)}, {side} {shown(self.limit)}: {self.change}"


@dataclass(frozen=True)
class Bound:
    """A threshold of the mean of one metric."""

    name: str
    metric: str
    limit: float
    change: str
    least: bool = False


BOUNDS = (
    Bound(
        "share of responses cut off",
        "response/truncated",
        0.5,
        "raise --sampling.max-new-tokens or --max-episode-tokens",
    ),
    Bound(
        "share of groups without signal",
        "groups/no_signal",
        0.9,
        "other tasks, a larger --group-size, or --filter-groups.enable",
    ),
    Bound(
        "distance of the sampler's log-probs from the trainer's",
        "log_prob_difference",
        0.25,
        "sample by present weights from the whole distribution, or name --objective.off-policy truncate",
    ),
    Bound("KL to the reference model", "train/kl", 1.0, "lower --learning-rate, or raise --objective.kl-coef"),
    Bound("KL of a step's updates", "train/approx_kl", 0.1, "lower --learning-rate, or make fewer updates of a batch"),
    Bound(
        "entropy of sampled tokens, nats",
        "entropy",
        0.005,
        "lower --learning-rate, or raise --sampling.temperature",
        least=True,
    ),
    Bound(
        "effective sample size of off-policy weights",
        "train/mismatch/ess",
        0.3,
        "train on fresher responses (--schedule.staleness-threshold), or lower --learning-rate",
        least=True,
    ),
    Bound(
        "staleness, versions",
        "schedule/staleness",
        4.0,
        "lower --schedule.staleness-threshold, or sample on more devices",
    ),
    Bound("share of steps without an update", "train/skipped", 0.0, "lower --learning-rate, or set --trainer.dtype"),
    Bound(
        "share of time that training waits for responses",
        "time/waiting",
        0.5,
        "sample on more devices or copies (--rollout.data-parallel)",
    ),
)
LOWER_LR = "lower --learning-rate"
GRAD_NORM_RATIO = 10.0
"""The ratio to the median of earlier steps' gradient norms that present ones may have."""
DROP = 0.5
"""How far the mean reward may fall below its best, in deviations of a group's rewards."""
RESPONSES = 256
"""Responses of which a mean reward is taken at least: fewer fall by chance."""
PART = "reward/part/"
"""Beginning of the names of a reward's components."""
_READ = {bound.metric for bound in BOUNDS} | {
    *("step", "reward", "reward/std", "reward/mixed_groups", "rollout/episodes", "train/grad_norm"),
    *("time/wait_for_rollout_s", "time/step_s", "train/computed_sequences"),
}


def check_health(rows: Sequence[Row]) -> list[Check]:
    """Return the checks that the metrics of a run's steps allow, the sick ones first; none of other runs."""
    steps = [_with_shares(row) for row in rows if row.get("step", 0) > 0 and "reward" in row]
    if len(steps) < WINDOW:
        return []
    checks = [*_bounds(steps), *_gradients(steps), *_reward(steps), *_components(steps)]
    return sorted(checks, key=lambda check: check.healthy)


def health_row(row: Row) -> Row:
    """Return the metrics of a row that `check_health` reads, for a loop that calls it after each step."""
    return {name: value for name, value in row.items() if name in _READ or name.startswith(PART)}


def _with_shares(row: Row) -> Row:
    """Return the row with shares of what it tells otherwise."""
    more = {}
    if "reward/mixed_groups" in row:
        more["groups/no_signal"] = 1.0 - row["reward/mixed_groups"]
    if "time/wait_for_rollout_s" in row and row.get("time/step_s"):
        more["time/waiting"] = row["time/wait_for_rollout_s"] / row["time/step_s"]
    trained = row.get("train/computed_sequences", 1)
    return {name: value for name, value in {**row, **more}.items() if trained or name not in _OF_UPDATES}


_OF_UPDATES = ("train/mismatch/ess", "log_prob_difference", "train/approx_kl", "train/kl")
"""Metrics that say nothing where no sequence was computed."""


def _bounds(steps: Sequence[Row]) -> Iterator[Check]:
    for bound in BOUNDS:
        values = _values(steps, bound.metric)[-WINDOW:]
        if len(values) == WINDOW:
            yield Check(bound.name, fmean(values), bound.limit, bound.change, bound.least)


def _gradients(steps: Sequence[Row]) -> Iterator[Check]:
    norms = [norm for norm in _values(steps, "train/grad_norm") if norm]  # none of steps without signal
    if len(norms) > 2 * WINDOW:
        times = median(norms[-WINDOW:]) / median(norms[:-WINDOW])
        yield Check("gradient norm over its median before", times, GRAD_NORM_RATIO, LOWER_LR)


def _reward(steps: Sequence[Row]) -> Iterator[Check]:
    """Yield how far the mean reward of some steps is below the best of as many, in deviations of their rewards."""
    known = [(row["reward"], row["reward/std"]) for row in steps if "reward/std" in row]
    window = max(WINDOW, math.ceil(RESPONSES / max(1, steps[-1].get("rollout/episodes", 1))))
    means = [tuple(map(fmean, zip(*known[end - window : end], strict=True))) for end in range(window, len(known) + 1)]
    best, std = max(means, default=(0.0, 0.0))
    if std > 0:
        yield Check("fall of the reward below its best, deviations", (best - means[-1][0]) / std, DROP, LOWER_LR)


def _components(steps: Sequence[Row]) -> Iterator[Check]:
    """Yield the share of reward components that never differ, where there are several."""
    names = sorted({name for row in steps for name in row if name.startswith(PART)})
    if len(names) > 1:
        constant = [name for name in names if len(set(_values(steps, name))) == 1]
        named = ", ".join(name.removeprefix(PART) for name in constant)
        change = f"look at --reward: {named or 'each'} tells no response from another"
        yield Check("reward components that never differ", float(len(constant)), 0.0, change)


def _values(steps: Sequence[Row], name: str) -> list[float]:
    return [row[name] for row in steps if row.get(name) is not None]
