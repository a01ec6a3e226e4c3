"""The rows of a data file, one after another: JSON lines, JSON, CSV, Parquet, and gzip of each.

A row that can't be read becomes a record with the reason in its place, so that whoever reads can tell all of them.
"""

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = Mapping[str, Any]
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
"""The endings of data files; each may have .gz after it."""
MOST_ERRORS = 20
"""Bad rows that are told one by one; the others are counted."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row of a file, or why it is none. `number`: its line where the file has lines, else its row; both from 1."""

    number: int
    row: Row | None
    problem: str = ""


def kind_of(path: Path) -> str | None:
    """Return the ending of a data file without .gz, None for another file."""
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    return suffix if suffix in SUFFIXES else None


def place_of(path: Path, number: int) -> str:
    """Return the name of a record's place in its file: "line 3", or "row 3" of a file without lines."""
    return f"{'line' if kind_of(path) in ('.jsonl', '.ndjson', '.csv') else 'row'} {number}"


def named(path: Path, number: int) -> str:
    """Return a record's file and place there."""
    return f"{path}, {place_of(path, number)}"


def error_text(name: Path | str, problems: Sequence[str], hint: str = "") -> str:
    """Return the text of all bad rows of a file or files: the first `MOST_ERRORS`, and how many there are."""
    if len(problems) == 1 and not hint:
        return problems[0]
    shown = [problem.removeprefix(f"{name}, ") for problem in problems[:MOST_ERRORS]]
    rest = f"; and {len(problems) - MOST_ERRORS} more" if len(problems) > MOST_ERRORS else ""
    rows = "rows" if len(problems) > 1 else "row"
    return f"{name} has {len(problems)} bad {rows}{hint}: {'; '.join(shown)}{rest}"


def read_rows(path: Path) -> list[tuple[int, Row]]:
    """Return the rows of a file with their numbers, at least one.

    Raises:
        ValueError: the file or some of its rows can't be read; the text names each.
    """
    rows: list[tuple[int, Row]] = []
    problems: list[str] = []
    for record in stream_records(path):
        if record.row is None:
            problems.append(f"{named(path, record.number)}: {record.problem}")
        else:
            rows.append((record.number, record.row))
    if problems:
        raise ValueError(error_text(path, problems))
    return rows


def stream_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file, at least one, with no more of them in memory than the reader needs.

    A .json file is read whole: a list of rows, or an object that holds one list. One with JSON lines in it is read as
    such.

    Raises:
        ValueError: the file is missing, of another kind, empty, or not what its name says.
    """
    readers = {".json": _json, ".csv": _csv, ".parquet": _parquet}
    kind = kind_of(path)
    if kind is None:
        raise ValueError(
            f"{path}: expected a name ending in {', '.join(SUFFIXES)} (or one of them and .gz), got "
            f"{path.suffix or 'no ending'}"
        )
    if not path.is_file():
        raise ValueError(f"no such data file: {path}")
    none = True
    try:
        for record in readers.get(kind, _lines)(path):
            none = False
            yield record
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a whole gzip file ({error})") from error
    if none:
        raise ValueError(f"{path}: the file has no rows")


def _opened(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _lines(path: Path) -> Iterator[Record]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except UnicodeDecodeError as error:
                yield Record(number, None, f"not UTF-8 (byte {error.start} of the line)")
                continue
            except json.JSONDecodeError as error:
                yield Record(number, None, f"not JSON ({error.msg} at column {error.colno})")
                continue
            if text.strip():
                yield _record(number, row)


def _record(number: int, row: Any) -> Record:
    if isinstance(row, dict):
        return Record(number, row)
    return Record(number, None, f"expected an object, got {type(row).__name__}")


def _json(path: Path) -> Iterator[Record]:
    with _opened(path) as file:
        content = file.read()
    if not content.strip():
        return
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _lines(path)
            return
        raise ValueError(f"{path}: not JSON ({error.msg} at line {error.lineno}, column {error.colno})") from error
    if isinstance(value, dict):
        lists = [name for name, item in value.items() if isinstance(item, list)]
        if len(lists) != 1:
            raise ValueError(
                f"{path}: expected a list of rows, or an object with one list of them, got an object with "
                f"{len(lists)} lists ({', '.join(lists) or 'none'})"
            )
        value = value[lists[0]]
    if not isinstance(value, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(value).__name__}")
    for number, row in enumerate(value, start=1):
        yield _record(number, row)


def _csv(path: Path) -> Iterator[Record]:
    """Yield rows of texts; the first line has the names of the columns."""
    limit = csv.field_size_limit(sys.maxsize)  # a conversation may be longer than the csv module's usual field
    try:
        with _opened(path) as binary, io.TextIOWrapper(binary, "utf-8-sig", newline="") as text:
            rows = csv.reader(text, strict=True)
            names = next(rows, [])
            if len(set(names)) < len(names):
                raise ValueError(f"{path}: a column is named twice in {', '.join(names)}")
            first = rows.line_num + 1
            for row in rows:
                if row:
                    good = len(row) == len(names)
                    why = "" if good else f"{len(row)} values for {len(names)} columns"
                    yield Record(first, dict(zip(names, row, strict=True)) if good else None, why)
                first = rows.line_num + 1
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason})") from error
    except csv.Error as error:
        raise ValueError(f"{path}: not CSV behind line {first - 1} ({error})") from error
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Iterator[Record]:
    try:
        with _opened(path) as source:
            whole = pa.BufferReader(source.read()) if path.suffix == ".gz" else source
            with pq.ParquetFile(whole) as file:
                number = 0
                for batch in file.iter_batches(batch_size=_rows_at_once(file.metadata)):
                    for number, row in enumerate(batch.to_pylist(), start=number + 1):  # noqa: B020
                        yield Record(number, row)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a whole Parquet file ({error})") from error


def _rows_at_once(metadata: Any) -> int:
    """Return the number of rows that are 4 MiB on average, as rows may hold images."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return int(max(1, min(1024, 2**22 * metadata.num_rows // max(size, 1))))
