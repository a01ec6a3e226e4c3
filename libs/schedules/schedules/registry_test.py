"""Schedules of a user by FILE.py:NAME: options by their signature, and what they give has a schedule's methods."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from schedules.config import ScheduleConfig
from schedules.registry import ScheduleParts, build_schedule

SOURCE = """
class Mine:
    def __init__(self, parts, every: int = 1):
        self.parts, self.every = parts, every
    def __enter__(self): return self
    def __exit__(self, *error): pass
    def step(self, step): pass
    def evaluate(self): pass
    def saving(self, step): pass
    def saved(self, step): pass

def half(parts):
    return object()

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "own_schedule.py"
    path.write_text(SOURCE)
    return str(path)


def parts_of(config: ScheduleConfig) -> ScheduleParts:
    """Parts that the schedules here read nothing of."""
    nothing: list[Any] = [None] * 4
    return ScheduleParts(config, *nothing)


def test_a_class_of_a_file_is_a_schedule_with_options(file: str) -> None:
    config = pickle.loads(pickle.dumps(ScheduleConfig(mode=f"{file}:Mine", options=("every=3",))))
    made: Any = build_schedule(parts_of(config))
    assert (made.every, made.parts.config) == (3, config)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Mine", ("evry=3",), "options: there is no option 'evry', did you mean every?"),
        ("Mine", ("every=x",), "every: int = 1 can't be 'x'"),
        ("number", (), "is a int: a class or function of ScheduleParts is needed"),
        ("mine", (), "has no 'mine' for --schedule; did you mean Mine"),
    ],
)
def test_wrong_names_and_options_are_refused_when_it_is_made(
    file: str, name: str, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ScheduleConfig(mode=f"{file}:{name}", options=options)


def test_options_of_a_schedule_without_any_are_refused() -> None:
    with pytest.raises(ValueError, match="options: mode 'sync' has none, every=2 has no effect"):
        ScheduleConfig(options=("every=2",))


def test_what_lacks_a_method_is_named(file: str) -> None:
    with pytest.raises(ValueError, match="gave a object without __enter__, __exit__, step, evaluate, saving, saved"):
        build_schedule(parts_of(ScheduleConfig(mode=f"{file}:half")))
