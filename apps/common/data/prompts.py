"""Prompt files: a question and its reference answer a row, JSON lines or Parquet, checked in full before training."""

import difflib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Message = dict[str, Any]
Row = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation whose next message is the response, and the reference answer."""

    messages: tuple[Message, ...]
    reference: str
    row: int
    columns: Row = field(default_factory=dict, repr=False, compare=False)
    """The whole row of the file."""


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
            row,
        )
        for i, row in enumerate(rows, start=1)
    ]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a .jsonl or .parquet file, at least one; see `stream_rows`."""
    return list(stream_rows(path))


def stream_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a .jsonl or .parquet file, at least one, with no more of them in memory than the reader needs.

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
        rows = _stream_jsonl(path)
    elif path.suffix == ".parquet":
        rows = _stream_parquet(path)
    else:
        raise ValueError(f"{path}: expected a name ending in .jsonl or .parquet, got {path.suffix or 'no ending'}")
    none = True
    for row in rows:
        none = False
        yield row
    if none:
        raise ValueError(f"{path}: the file has no rows")


def _stream_jsonl(path: Path) -> Iterator[Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number}: not UTF-8 (byte {error.start} of the line)") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
            if isinstance(row, dict):
                yield row
            elif text.strip():
                raise ValueError(f"{path}, line {number}: expected an object, got {type(row).__name__}")


def _stream_parquet(path: Path) -> Iterator[Row]:
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_rows_at_once(file.metadata)):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error})") from error


def _rows_at_once(metadata: Any) -> int:
    """Return the number of rows that are 4 MiB on average, as rows may hold images."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return int(max(1, min(1024, 2**22 * metadata.num_rows // max(size, 1))))


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
    where = f"{path}, row {number}, column {column!r}"
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


def _reference(path: Path, number: int, row: Row, column: str) -> str:
    value = _field(path, number, row, column)
    number_like = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number_like and not (isinstance(value, str) and value.strip()):
        raise ValueError(
            f"{path}, row {number}, column {column!r}: expected a text or a number, got {_describe(value)}"
        )
    return str(value)


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
