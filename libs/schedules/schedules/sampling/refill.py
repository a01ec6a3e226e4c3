"""Rounds of sampling that fill a step with groups: one where groups are taken as they are, else until all have signal.

Groups are numbered in the order of the run's tasks, as `NumberedRows` has them; a round asks the next ones, as many as
the step still lacks. So the prompts of a run follow from what was sampled alone, on any number of ranks. A step that is
repeated from its `place` asks the same again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from rollout import Episode, TaskRow
from rollout.episodes.codec import decode_episodes
from schedules.config import FilterGroups
from schedules.protocols import Tasks
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.sampling.numbered_tasks import NumberedRows
from schedules.sampling.settings import RolloutSettings, RunState
from schedules.sampling.task_state import load_cursor

GEN_BATCHES = "filter_groups/num_gen_batches"
DROPPED = "filter_groups/groups_dropped"
DROPPED_TOKENS = "filter_groups/tokens_dropped"


def has_signal(group: Sequence[Episode], metric: str = "reward") -> bool:
    """Return whether the episodes of a group differ in what `FilterGroups.metric` names; failed ones do not count.

    Raises:
        ValueError: no such reward component.
    """
    scores = [episode.score for episode in group if episode.score is not None]
    if metric in ("reward", "any"):
        components = [score.reward_components for score in scores] if metric == "any" else []
        return len({score.reward for score in scores}) > 1 or any(part != components[0] for part in components)
    if missing := [score for score in scores if metric not in score.reward_components]:
        names = ", ".join(missing[0].reward_components) or "none"
        raise ValueError(f"--filter-groups.metric {metric}: no such reward component; there are: {names}")
    return len({score.reward_components[metric] for score in scores}) > 1


def with_signal(episodes: Sequence[Episode], settings: FilterGroups) -> list[Episode]:
    """Return the episodes of those groups that have signal."""
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    return [episode for group in groups.values() if has_signal(group, settings.metric) for episode in group]


class GroupFilter:
    """Filter of groups that end one by one, and what it has left out for the next step; of one thread at a time."""

    def __init__(self, settings: FilterGroups, per_step: int) -> None:
        self._settings, self._per_step = settings, per_step
        self._tokens: list[int] = []  # of each group that was left out

    def drops(self, payload: bytes) -> bool:
        """Return whether another group takes the place of this one."""
        most = (self._settings.max_num_gen_batches - 1) * self._per_step
        if not self._settings.enable or len(self._tokens) >= most:
            return False
        group = decode_episodes(payload)
        if has_signal(group, self._settings.metric):
            return False
        self._tokens.append(sum(episode.sampled for episode in group))
        return True

    def metrics(self) -> dict[str, float]:
        """Return what was left out since the last call; none where groups are taken as they are."""
        tokens, self._tokens = self._tokens, []
        found = (1 + len(tokens) / self._per_step, float(len(tokens)), float(sum(tokens)))
        return dict(zip((GEN_BATCHES, DROPPED, DROPPED_TOKENS), found, strict=True)) if self._settings.enable else {}


@dataclass(frozen=True)
class Filled:
    """Groups of a step: the task of each, its episodes, and what it took."""

    rows: Sequence[TaskRow]
    episodes: list[Episode]
    rounds: Sequence[int]
    metrics: Mapping[str, float]


Play = Callable[[int, Sequence[TaskRow], bool], list[Episode]]
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

    def place(self) -> dict[str, Any]:
        """Return from where another run goes on, as JSON can write it."""
        return {"round": self.round, "number": self._number, "rows": self._rows.place(self._number)}

    def ahead(self, rows: int) -> list[TaskRow]:
        """Return the next rows."""
        return [self._rows[number] for number in range(self._number, self._number + rows)]

    def step(self, play: Play) -> Filled:
        """Sample the groups of a step."""
        rows: list[TaskRow] = []
        episodes: list[Episode] = []
        first, asked, tokens = self.round, 0, 0
        for attempt in count(1):
            final = not self._filter.enable or attempt == self._filter.max_num_gen_batches
            asks = self.ahead(self._count - len(rows))
            played = play(self.round, asks, final)
            kept = played if final else with_signal(played, self._filter)
            groups = range(len(asks)) if final else sorted({episode.group for episode in kept})
            places = {group: len(rows) + at for at, group in enumerate(groups)}
            rows += [asks[group] for group in places]
            episodes += [replace(episode, group=places[episode.group]) for episode in kept]
            tokens += sum(e.sampled for e in played) - sum(e.sampled for e in kept)
            self.round, self._number, asked = self.round + 1, self._number + len(asks), asked + len(asks)
            if len(rows) == self._count:
                break
        self._rows.forget(self._number)
        dropped = {DROPPED: float(asked - len(rows)), DROPPED_TOKENS: float(tokens)}
        metrics = {GEN_BATCHES: float(attempt)} | dropped if self._filter.enable else {}
        return Filled(rows, episodes, range(first, self.round), metrics)
