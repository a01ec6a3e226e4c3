"""Which of a run's episodes a report shows: whole groups, drawn without a look at what is in them.

1. A line of the log belongs to a group: the episodes of one step, split and environment that answer the same task.
2. Of each split's groups a reservoir is drawn (Vitter's algorithm R, 1985) with a seed: each group is in it with the
   same chance, whatever its rewards and however long the run; the same log gives the same sample.
3. Only the lines of the drawn groups are parsed in full, so that a log of a million lines is no burden.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runlog.store import parse_line

TRAINING, HELD_OUT = "training", "held-out"
Key = tuple[Any, ...]
# A line as `RunLog.episode` writes it begins with these keys; any other line is parsed in full.
_TEXT = rb'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(
    rb'\{"step":-?\d+,"split":'
    + _TEXT
    + rb',"environment":(?:null|'
    + _TEXT
    + rb'),"group":(?:null|-?\d+|'
    + _TEXT
    + rb")"
)


@dataclass(frozen=True)
class Sample:
    """The number of logged episodes, and the drawn ones: one list a group, each row with its line's number from 0."""

    logged: int
    groups: list[list[tuple[int, dict[str, Any]]]]


def ordered(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return the episode with all keys of its group first, as `draw_groups` expects them."""
    first = {"step": episode["step"], "split": episode.get("split") or TRAINING}
    first |= {"environment": episode.get("environment"), "group": episode.get("group")}
    return first | {key: value for key, value in episode.items() if key not in first}


def draw_groups(path: Path, wanted: int, split: str = TRAINING, seed: int = 0) -> Sample:
    """Draw at most `wanted` groups of a split; `logged` counts the split's episodes. Empty if the file is absent.

    Raises:
        ValueError: a line is not a JSON object; a last line that a kill cut short is left out.
    """
    lines: list[tuple[int, Key]] = []
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if line.endswith(b"\n") and (key := _key(path, number, line))[1] == split:
                    lines.append((number, key if key[3] is not None else (*key, number)))
    chosen = _reservoir(list(dict.fromkeys(key for _, key in lines)), wanted, random.Random(seed))
    places = {number: chosen[key] for number, key in lines if key in chosen}
    groups: list[list[tuple[int, dict[str, Any]]]] = [[] for _ in chosen]
    if places:
        with path.open("rb") as file:
            for number, line in enumerate(file):
                if number in places:
                    groups[places[number]].append((number, parse_line(path, number + 1, line.decode("utf-8"))))
    return Sample(len(lines), groups)


def _key(path: Path, number: int, line: bytes) -> Key:
    """Return (step, split, environment, group) of a line, from its first characters where they suffice."""
    head = _HEAD.match(line)
    row = json.loads(head[0] + b"}") if head else parse_line(path, number + 1, line.decode("utf-8"))
    return (row.get("step"), row.get("split") or TRAINING, row.get("environment"), row.get("group"))


def _reservoir(keys: Sequence[Key], wanted: int, rng: random.Random) -> dict[Key, int]:
    """Return the drawn keys and the place of each, in random order, so that any first few are a sample too."""
    drawn: list[Key] = []
    for number, key in enumerate(keys):
        if len(drawn) < wanted:
            drawn.append(key)
        elif (place := rng.randrange(number + 1)) < wanted:
            drawn[place] = key
    rng.shuffle(drawn)
    return {key: place for place, key in enumerate(drawn)}
