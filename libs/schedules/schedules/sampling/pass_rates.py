"""Mean rewards of tasks when they were last asked, and which tasks are asked again by them: difficulty pools.

They are in a file of the run's folder, a line a group, written before the group counts as sampled. A task's visit in a
round is judged by earlier visits in earlier rounds alone, so that a run which is resumed decides as it did.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rollout import TaskRow
from rollout.episodes.summary import AnyEpisode
from rollout.seeds import derive_seed
from schedules.config import FilterGroups
from schedules.runtime.collectives import broadcast_result, rank_and_world

NAME = "pass_rates.jsonl"


class PassRates:
    """The rates of a run, and its pools; every rank has the same. Nothing is kept where all tasks are asked again."""

    def __init__(self, settings: FilterGroups, run_dir: Path, seed: int | None) -> None:
        self._settings, self._path, self._seed = settings, run_dir / NAME, seed or 0
        self._keeps = settings.enable and min(settings.easy_fraction, settings.hard_fraction) < 1
        self._rates: dict[str, dict[int, tuple[int, float]]] = {}  # by task and visit: round and mean reward
        if self._keeps:
            first = rank_and_world()[0] == 0 and self._path.is_file()
            for line in broadcast_result(self._path.read_text(encoding="utf-8") if first else "").split("\n"):
                if line.endswith("}"):  # a killed writer's last line lacks its end
                    record = json.loads(line)
                    self._rates.setdefault(record["task"], {})[record["visit"]] = (
                        record["round"],
                        record["mean_reward"],
                    )

    def note(self, row: TaskRow, group: Sequence[AnyEpisode], number: int = 0) -> None:
        """Keep the mean reward of a task's group, of round `number`; one that failed as a whole says nothing."""
        rewards = [episode.reward for episode in group if episode.score is not None]
        if not self._keeps or not rewards or row.visit in self._rates.get(row.key, {}):
            return
        self._rates.setdefault(row.key, {})[row.visit] = (number, fmean(rewards))
        if rank_and_world()[0] == 0:
            with self._path.open("a", encoding="utf-8") as file:
                record = {"task": row.key, "visit": row.visit, "round": number, "mean_reward": fmean(rewards)}
                file.write(f"\n{json.dumps(record)}")

    def skips(self, row: TaskRow, number: int = 1) -> bool:
        """Return whether a task is left out of round `number`."""
        rates = self._rates.get(row.key, {})
        earlier = [visit for visit, (before, _) in rates.items() if visit < row.visit and before < number]
        if not earlier:
            return False
        rate, settings = rates[max(earlier)][1], self._settings
        easy, hard = rate >= settings.easy_threshold, rate <= settings.hard_threshold
        share = settings.easy_fraction if easy else settings.hard_fraction if hard else 1.0
        return random.Random(derive_seed(self._seed, f"pool {row.key}", row.visit)).random() >= share
