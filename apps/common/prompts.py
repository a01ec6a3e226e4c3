"""Prompt files: a question and its reference answer a row, JSON lines or Parquet, checked in full before training."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, Any]
Row = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation that waits for its reply, and what the reply should come to."""

    messages: tuple[Message, ...]
    reference: str
    row: int


def read_prompts(path: Path, prompt_column: str, answer_column: str) -> list[Prompt]:
    """Read every row of a .jsonl or .parquet file.

    A prompt is a string (one user turn) or a list of messages with role and content, a reference a string or a number.
    A column name with dots reaches into nested objects ("reward_model.ground_truth").

    Raises:
        ValueError: no such file, no rows, a missing column, or a value of the wrong type; the text names the row.
    """
    rows = read_rows(path)
    return [
        Prompt(
            _messages(path, i, prompt_column, _field(path, i, row, prompt_column)),
            _reference(path, i, row, answer_column),
            i,
        )
        for i, row in enumerate(rows, start=1)
    ]


def read_rows(path: Path) -> list[Row]:
    """The rows of a .jsonl or .parquet file, at least one.

    Raises:
        ValueError: the file is missing, of another kind, empty, or not what its name says.
    """
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*")] if path.parent.is_dir() else [], n=1
        )
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"no such data file: {path}{hint}")
    if path.suffix in (".jsonl", ".ndjson"):
        rows = _read_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _read_parquet(path)
    else:
        raise ValueError(f"{path}: expected a name ending in .jsonl or .parquet, got {path.suffix or 'no ending'}")
    if not rows:
        raise ValueError(f"{path}: the file has no rows")
    return rows


def _read_jsonl(path: Path) -> list[Row]:
    rows: list[Row] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}")
            rows.append(row)
    return rows


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist()
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file ({error})") from error


def _field(path: Path, number: int, row: Row, column: str) -> Any:
    value: Any = row
    if column in row:
        return row[column]
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            near = difflib.get_close_matches(column, list(row), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{path}, row {number}: no column {column!r}; it has {', '.join(row)}.{hint}")
        value = value[part]
    return value


def _messages(path: Path, number: int, column: str, value: Any) -> tuple[Message, ...]:
    if isinstance(value, str) and value.strip():
        return ({"role": "user", "content": value},)
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and m.get("role") in ROLES and "content" in m for m in value)
    ):
        return tuple(value)
    raise ValueError(
        f"{path}, row {number}, column {column!r}: expected a text or a list of messages with role and content, "
        f"got {_describe(value)}"
    )


def _reference(path: Path, number: int, row: Row, column: str) -> str:
    value = _field(path, number, row, column)
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value == "":
        raise ValueError(
            f"{path}, row {number}, column {column!r}: expected a text or a number, got {_describe(value)}"
        )
    return str(value)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
