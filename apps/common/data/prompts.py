"""Prompt files: a question and its reference answer a row, checked in full before training."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from apps.common.data.files import data_files
from apps.common.data.rows import Row, error_text, named, stream_records

T = TypeVar("T")
Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation whose next message is the response, and the reference answer."""

    messages: tuple[Message, ...]
    reference: str
    row: int
    columns: Row = field(default_factory=dict, repr=False, compare=False)
    """The whole row of the file."""
    place: str = field(default="", compare=False)
    """The row's file and line, for messages."""


def read_prompts(name: Path, prompt_column: str, answer_column: str) -> list[Prompt]:
    """Read every row of the files behind a name; see `data_files` for what it may be.

    A prompt is a string (one user turn) or a list of messages with role and content, a reference a string or a number.
    A column name with dots reaches into nested objects ("reward_model.ground_truth").

    Raises:
        ValueError: no such file, no rows, a missing column, or a value of the wrong type; all bad rows of a file are
            told at once.
    """
    files = data_files(name)
    prompts: list[Prompt] = []
    problems: list[str] = []
    for path in files:
        for record in stream_records(path):
            place = named(path, record.number)
            try:
                if record.row is None:
                    raise ValueError(record.problem)
                messages = _messages(prompt_column, _field(record.row, prompt_column))
                reference = _reference(record.row, answer_column)
            except ValueError as error:
                problems.append(f"{place}: {error}")
                continue
            number = record.number if len(files) == 1 else len(prompts) + 1
            prompts.append(Prompt(messages, reference, number, record.row, place))
    if problems:
        raise ValueError(error_text(name, problems))
    return prompts


def for_each(name: Path, prompts: Sequence[Prompt], change: Callable[[Prompt], T]) -> list[T]:
    """Return `change(prompt)` of each; raise ValueError with the places of all that it refuses by one.

    Raises:
        ValueError: a prompt is refused.
    """
    made: list[T] = []
    problems: list[str] = []
    for prompt in prompts:
        try:
            made.append(change(prompt))
        except ValueError as error:
            problems.append(f"{prompt.place}: {error}")
    if problems:
        raise ValueError(error_text(name, problems))
    return made


def _field(row: Row, column: str) -> Any:
    value: Any = row
    if column in row:
        return row[column]
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = difflib.get_close_matches(column, list(row), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no column {column!r}; it has {', '.join(row)}.{hint}")
        value = value[part]
    return value


def _messages(column: str, value: Any) -> tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    where = f"column {column!r}"
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{where}: expected a text or a list of messages with role and content, got {_describe(value)}"
        )
    for message in value:
        problem = message_problem(message)
        if problem:
            raise ValueError(f"{where}: {problem}, got {_describe(message)}")
    if value[-1]["role"] == "assistant":
        raise ValueError(f"{where}: the last message is the assistant's, so that nothing is left to answer")
    return tuple(value)


def message_problem(message: Any) -> str | None:
    """Return why a value is not a message of a text conversation; None where it is one."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        return f"a message needs a role of {', '.join(ROLES)}"
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
        if any(kind != "text" for kind in kinds):
            return "only text can be asked so far: a part of the content is of another type"
    elif not isinstance(content, str) and not (content is None and calls):
        return "a message needs its content, a text or a list of text parts"
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        return "tool_calls must be a list of objects"
    return None


def _reference(row: Row, column: str) -> str:
    value = _field(row, column)
    number_like = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number_like and not (isinstance(value, str) and value.strip()):
        raise ValueError(f"column {column!r}: expected a text or a number, got {_describe(value)}")
    return str(value)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
