"""The episodes that the report shows: whole groups of a step, and wrong responses to held-out tasks.

Both are drawn at random, by a seed and without a look at rewards or advantages: what is shown is what there was.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout import Episode, TaskRow, failures
from rollout.episodes.summary import AnyEpisode
from rollout.seeds import derive_seed
from schedules.rows.shared import on_first_rank

Decode = Callable[[int], str]
MOST_REASONS = 3  # of failed episodes, in the log of a step
REASON_CHARACTERS = 300


def token_decoder(tokenizer: Any) -> Decode:
    """Return a function from a token to its text."""
    return lambda token: str(tokenizer.decode([token]))


@dataclass(frozen=True)
class EpisodeSamples:
    """The sampling and formatting of a step's episodes. `environment`: a task's by its id, None where a run has one."""

    step: int
    seed: int
    decode: Decode
    environment: Callable[[str], str | None]

    def groups(
        self, episodes: Sequence[AnyEpisode], advantages: Sequence[float], rows: Sequence[TaskRow], count: int
    ) -> list[dict[str, Any]]:
        """Return at most `count` groups with all their episodes, for `runlog`; `rows` are the step's tasks by group.

        Collective, as `failures` is: the episodes come to rank 0, and the others return nothing.
        """
        groups = sorted({episode.group for episode in episodes})
        chosen = set(self._random("groups").sample(groups, min(count, len(groups))))
        shown = on_first_rank(episodes, (n for n, episode in enumerate(episodes) if episode.group in chosen))
        return [
            self._told(episode, rows[episode.group]) | {"group": episode.group, "advantage": advantages[place]}
            for place, episode in shown.items()
        ]

    def failures(self, episodes: Sequence[AnyEpisode], rows: Sequence[TaskRow], count: int) -> list[dict[str, Any]]:
        """Return at most `count` held-out responses that solve nothing: no reward, none above 0, less than the best.

        The best of this evaluation: the highest possible reward is not known.
        """
        best = max((episode.reward for episode in episodes if episode.score is not None), default=0.0)
        wrong = [
            place
            for place, episode in enumerate(episodes)
            if episode.score is None or episode.reward <= 0 or episode.reward < best
        ]
        chosen = sorted(self._random("failures").sample(wrong, min(count, len(wrong))))
        return [
            self._told(episode, rows[episode.group]) | {"split": "held-out", "group": episode.group}
            for episode in on_first_rank(episodes, chosen).values()
        ]

    def _told(self, episode: Episode, row: TaskRow) -> dict[str, Any]:
        place = {"step": self.step, "environment": self.environment(episode.task_id)}
        return place | episode_record(episode, row, self.decode)

    def _random(self, what: str) -> random.Random:
        return random.Random(derive_seed(self.seed, f"shown {what}", self.step))


def failure_note(place: str, episodes: Sequence[AnyEpisode]) -> str | None:
    """Return a line with the commonest reasons why episodes of `place` failed, counted; None where none did."""
    counts = failures(episodes)
    if not counts:
        return None
    reasons = [f"{count} x {_on_a_line(reason)}" for reason, count in list(counts.items())[:MOST_REASONS]]
    more = len(counts) - len(reasons)
    text = "; ".join(reasons) + (f"; and {more} more reasons" if more else "")
    return f"{place}: {sum(counts.values())} of {len(episodes)} episodes failed: {text}"


def _on_a_line(reason: str) -> str:
    """Return the reason without control characters, at most REASON_CHARACTERS long."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 3] + "..."


def episode_record(episode: Episode, row: TaskRow, decode: Decode) -> dict[str, Any]:
    """Return an episode as `runlog.episodes` describes it, several token streams one after another."""
    segments = episode.segments
    return {
        "reward": None if episode.score is None else episode.reward,
        "parts": {} if episode.score is None else dict(episode.score.reward_components),
        "expected": expected_answer(row),
        "error": episode.error,
        "tokens": [decode(token) for segment in segments for token in segment.ids],
        "mask": [on for segment in segments for on in segment.loss_mask],
        "log_probs": [value for segment in segments for value in segment.log_probs],
        "versions": [version for segment in segments for version in segment.policy_versions],
        "messages": [dict(message) for message in episode.messages],
        "metadata": {"end": episode.end, "task": episode.task_id, "attempt": episode.attempt, **episode.metrics},
    }


def expected_answer(row: TaskRow) -> str | None:
    """Return a task's expected answer where its data has one: a prompt's reference, a problem's or a row's answer."""
    for value in (getattr(row.data.get("prompt"), "reference", None), getattr(row.data.get("problem"), "answer", None)):
        if value is not None:
            return str(value)
    answer = row.data.get("answer")
    return None if answer is None else str(answer)
