"""The episodes that the report shows: whole groups of a step, and answers to held-out tasks that were wrong.

Both are drawn at random, by a seed and without a look at rewards or advantages: what is shown is what there was.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rollout import Episode, TaskRow, failures
from rollout.seeds import derive_seed

Decode = Callable[[int], str]
MOST_REASONS = 3  # of failed episodes, in the log of a step
REASON_CHARACTERS = 300


def decoder(tokenizer: PreTrainedTokenizerBase) -> Decode:
    """Return the text of a single token."""
    return lambda token: str(tokenizer.decode([token]))


@dataclass(frozen=True)
class Shown:
    """How the episodes of a step are drawn and told. `environment`: a task's by its id, None where a run has one."""

    step: int
    seed: int
    decode: Decode
    environment: Callable[[str], str | None]

    def groups(
        self, episodes: Sequence[Episode], advantages: Sequence[float], rows: Sequence[TaskRow], count: int
    ) -> list[dict[str, Any]]:
        """Return at most `count` groups with all their episodes, for `runlog`; `rows` are the step's tasks by group."""
        groups = sorted({episode.group for episode in episodes})
        chosen = set(self._random("groups").sample(groups, min(count, len(groups))))
        return [
            self._told(episode, rows[episode.group]) | {"group": episode.group, "advantage": advantage}
            for episode, advantage in zip(episodes, advantages, strict=True)
            if episode.group in chosen
        ]

    def failures(self, episodes: Sequence[Episode], rows: Sequence[TaskRow], count: int) -> list[dict[str, Any]]:
        """Return at most `count` of the held-out tasks that were not solved: no reward, none above 0, or less than the
        best.

        The best of this evaluation, as nobody says what a reward's full mark is.
        """
        best = max((episode.reward for episode in episodes if episode.score is not None), default=0.0)
        wrong = [
            place
            for place, episode in enumerate(episodes)
            if episode.score is None or episode.reward <= 0 or episode.reward < best
        ]
        chosen = sorted(self._random("failures").sample(wrong, min(count, len(wrong))))
        return [self._told(episodes[i], rows[i]) | {"split": "held-out", "group": i} for i in chosen]

    def _told(self, episode: Episode, row: TaskRow) -> dict[str, Any]:
        place = {"step": self.step, "environment": self.environment(episode.task_id)}
        return place | shown(episode, row, self.decode)

    def _random(self, what: str) -> random.Random:
        return random.Random(derive_seed(self.seed, f"shown {what}", self.step))


def failure_note(place: str, episodes: Sequence[Episode]) -> str | None:
    """Return why episodes of a step or an evaluation (`place`) failed: the commonest reasons, counted, on a line. None
    where none did."""
    found = failures(episodes)
    if not found:
        return None
    reasons = [f"{count} x {_on_a_line(reason)}" for reason, count in list(found.items())[:MOST_REASONS]]
    more = len(found) - len(reasons)
    text = "; ".join(reasons) + (f"; and {more} more reasons" if more else "")
    return f"{place}: {sum(found.values())} of {len(episodes)} episodes failed: {text}"


def _on_a_line(reason: str) -> str:
    """Return without what a terminal would obey; at most REASON_CHARACTERS."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(reason.split()))
    return line if len(line) <= REASON_CHARACTERS else line[: REASON_CHARACTERS - 3] + "..."


def shown(episode: Episode, row: TaskRow, decode: Decode) -> dict[str, Any]:
    """Return an episode as `runlog.episodes` describes it; of several token streams one after another."""
    segments = episode.segments
    return {
        "reward": None if episode.score is None else episode.reward,
        "parts": {} if episode.score is None else dict(episode.score.parts),
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
    """Return what a task's answer should come to, where its data says: a prompt's reference, a problem's or a row's
    answer."""
    for value in (getattr(row.data.get("prompt"), "reference", None), getattr(row.data.get("problem"), "answer", None)):
        if value is not None:
            return str(value)
    answer = row.data.get("answer")
    return None if answer is None else str(answer)
