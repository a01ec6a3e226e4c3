"""Rounds of sampling that fill a step with groups: one where groups are taken as they are, else until all have signal.

Groups are numbered in the order of the run's tasks, as `NumberedRows` has them; a round asks the next ones, as many as
the step still lacks. So the prompts of a run follow from what was sampled alone, on any number of ranks. A step that is
repeated from its `place` asks the same again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from rollout import TaskRow
from rollout.episodes.codec import decode_episodes
from rollout.episodes.summary import AnyEpisode
from schedules.config import FilterGroups
from schedules.protocols import Tasks
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.sampling.numbered_tasks import NumberedRows
from schedules.sampling.pass_rates import PassRates
from schedules.sampling.settings import RolloutSettings, RunState
from schedules.sampling.task_state import load_cursor

GEN_BATCHES = "filter_groups/num_gen_batches"
DROPPED = "filter_groups/groups_dropped"
DROPPED_TOKENS = "filter_groups/tokens_dropped"
SKIPPED = "filter_groups/prompts_skipped"
T = TypeVar("T", bound=AnyEpisode)


def has_signal(group: Sequence[AnyEpisode], metric: str = "reward") -> bool:
    """Return whether the episodes of a group differ in what `FilterGroups.metric` names; failed ones do not count.

    Raises:
        ValueError: no such reward component.
    """
    scores = [episode.score for episode in group if episode.score is not None]
    if metric in ("reward", "any"):
        components = [score.reward_components for score in scores] if metric == "any" else []
        turns = {reward for score in scores for reward in score.turn_rewards} if metric == "any" else ()
        different = len({score.reward for score in scores}) > 1 or len(turns) > 1
        return different or any(part != components[0] for part in components)
    if missing := [score for score in scores if metric not in score.reward_components]:
        names = ", ".join(missing[0].reward_components) or "none"
        raise ValueError(f"--filter-groups.metric {metric}: no such reward component; there are: {names}")
    return len({score.reward_components[metric] for score in scores}) > 1


def with_signal(episodes: Sequence[T], settings: FilterGroups) -> list[T]:
    """Return the episodes of those groups that have signal."""
    groups: dict[int, list[T]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return [episode for group in groups.values() if has_signal(group, settings.metric) for episode in group]


class GroupFilter:
    """Filter of groups that end one by one, and what it has left out for the next step; of one thread at a time."""

    def __init__(self, settings: RolloutSettings, per_step: int, run_dir: Path) -> None:
        self._settings, self._per_step = settings.filter_groups, per_step
        self._rates = PassRates(settings.filter_groups, run_dir, settings.sampling.seed)
        self._tokens: list[int] = []  # of each group that was left out
        self._skipped = 0

    def skips(self, row: TaskRow) -> bool:
        """Return whether a task is not sampled at all this time (`PassRates`)."""
        skips = self._rates.skips(row)
        self._skipped += skips
        return skips

    def drops(self, row: TaskRow, payload: bytes) -> bool:
        """Return whether another group takes the place of this one of a task."""
        if not self._settings.enable:
            return False
        group = decode_episodes(payload)
        self._rates.note(row, group)
        most = (self._settings.max_num_gen_batches - 1) * self._per_step
        if len(self._tokens) >= most or has_signal(group, self._settings.metric):
            return False
        self._tokens.append(sum(episode.sampled for episode in group))
        return True

    def metrics(self) -> dict[str, float]:
        """Return what was left out since the last call; none where groups are taken as they are."""
        tokens, skipped, self._tokens, self._skipped = self._tokens, self._skipped, [], 0
        rounds = 1 + len(tokens) / self._per_step
        return _metrics(rounds, len(tokens), sum(tokens), skipped) if self._settings.enable else {}


def _metrics(rounds: float, dropped: int, tokens: int, skipped: int) -> dict[str, float]:
    return {GEN_BATCHES: float(rounds), DROPPED: float(dropped), DROPPED_TOKENS: float(tokens), SKIPPED: float(skipped)}


@dataclass(frozen=True)
class Filled:
    """Groups of a step: the task of each, its episodes, and what it took."""

    rows: Sequence[TaskRow]
    episodes: list[AnyEpisode]
    rounds: Sequence[int]
    metrics: Mapping[str, float]


Play = Callable[[int, Sequence[TaskRow], bool], Sequence[AnyEpisode]]
"""Player of a round, by its number: gives the episodes of all ranks, or of its groups with signal alone, numbered by
their row. True: groups are taken as they are."""


class Rounds:
    """The rounds of a run; every rank has the same. `run`: where it stands."""

    def __init__(self, tasks: Tasks, settings: RolloutSettings, run: RunState) -> None:
        self._filter, self._count = settings.filter_groups, settings.prompts_per_step
        place: dict[str, Any] = {"round": 0, "number": 0, "rows": None}
        if run.done:
            cursor = broadcast_result(load_cursor(run.run_dir, run.done) if rank_and_world()[0] == 0 else {})
            place = cursor
            if cursor.keys() != {"round", "number", "rows"}:  # as it was written before there were rounds
                rows = {"step": run.done, "cursor": cursor}
                place = {"round": run.done, "number": run.done * self._count, "rows": rows}
        self.round: int = place["round"]
        self._number: int = place["number"]
        self._rows = NumberedRows(tasks, self._count, place["rows"])
        self._rates = PassRates(settings.filter_groups, run.run_dir, settings.sampling.seed)

    def place(self) -> dict[str, Any]:
        """Return from where another run goes on, as JSON can write it."""
        return {"round": self.round, "number": self._number, "rows": self._rows.place(self._number)}

    def ahead(self, count: int) -> tuple[list[TaskRow], int]:
        """Return the next rows, but those that difficulty pools leave out, and the number behind them."""
        rows, number = list[TaskRow](), self._number
        while len(rows) < count:
            rows += [] if self._rates.skips(self._rows[number], self.round) else [self._rows[number]]
            number += 1
        return rows, number

    def step(self, play: Play) -> Filled:
        """Sample the groups of a step."""
        rows: list[TaskRow] = []
        episodes: list[AnyEpisode] = []
        first, dropped, tokens, skipped = self.round, 0, 0, 0
        for attempt in count(1):
            final = not self._filter.enable or attempt == self._filter.max_num_gen_batches
            asks, end = self.ahead(self._count - len(rows))
            played = play(self.round, asks, final)
            groups_of: dict[int, list[AnyEpisode]] = {}
            for episode in played:
                groups_of.setdefault(episode.group, []).append(episode)
            for at, row in enumerate(asks):
                self._rates.note(row, groups_of.get(at, []), self.round)
            kept = played if final else with_signal(played, self._filter)
            groups = range(len(asks)) if final else sorted({episode.group for episode in kept})
            places = {group: len(rows) + at for at, group in enumerate(groups)}
            rows += [asks[group] for group in places]
            episodes += [e if e.group == places[e.group] else replace(e, group=places[e.group]) for e in kept]
            tokens += 0 if final else sum(e.sampled for e in played) - sum(e.sampled for e in kept)
            dropped, skipped = dropped + len(asks) - len(groups), skipped + end - self._number - len(asks)
            self.round, self._number = self.round + 1, end
            if len(rows) == self._count:
                break
        self._rows.forget(self._number)
        metrics = _metrics(attempt, dropped, tokens, skipped) if self._filter.enable else {}
        return Filled(rows, episodes, range(first, self.round), metrics)
