"""Files of conversations (jsonl, parquet) to tokens and masks, in parallel; skipped rows are counted by reason."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chat_tools.extras import missing_extra_message
from chat_tools.rendering.render import render
from chat_tools.rendering.template import template_errors

PROBLEM = "the mask is not proven"  # how the reason for skipping a row with `Rendered.problems` begins
ROWS_A_TASK = 64
ROWS_A_WORKER = 500  # fewer rows than this are not worth another process
BYTES_A_WORKER = 700 << 20  # of memory: an interpreter with a tokenizer of a quarter million entries


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Options of tokenisation.

    `messages` and `tools` name the columns; either may hold lists or JSON text. Rows longer than `max_length` tokens
    are skipped, and rows without a trained token. With `strict` a row with `Rendered.problems` is skipped and counted
    by the first of them: ids that are not the template's, a turn that could not be proven, calls that the template
    leaves out. Without it such rows are kept, the turns in question untrained. A token that straddles a turn's border
    is not trained and no problem. `stop_tokens` are those of the model, by text or id (`read_stop_tokens`).
    """

    messages: str = "messages"
    tools: str = "tools"
    max_length: int | None = None
    strict: bool = True
    stop_tokens: tuple[str | int, ...] | None = None
    template_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Example:
    """A tokenised row: its number in the input, ids and the mask of trained tokens."""

    row: int
    ids: list[int]
    loss_mask: list[bool]


@dataclass(slots=True)
class DatasetReport:
    """The outcome of the rows. `skipped` counts by reason; `examples` names a first row of each reason."""

    rows: int = 0
    kept: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    workers: int = 1
    seconds: float = 0.0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def skip(self, reason: str, where: str) -> None:
        """Count a skipped row."""
        self.skipped[reason] += 1
        self.examples.setdefault(reason, where)

    def __str__(self) -> str:
        head = f"{self.kept} of {self.rows} rows, {self.tokens} tokens, {self.trained_tokens} trained"
        lines = [f"{head}; {self.seconds:.1f} s with {self.workers} workers"]
        lines += [f"skipped {n}: {reason} (first: {self.examples[reason]})" for reason, n in self.skipped.most_common()]
        return "\n".join(lines)


Progress = Callable[[int, int | None], None]


def usable_workers(requested: int | None = None, rows: int | None = None) -> int:
    """Return the number of processes that tokenise: no more than processors, memory and rows allow.

    A larger request is reduced to that. `rows` None: unknown.
    """
    if requested is not None and requested < 1:
        raise ValueError(f"workers must be at least 1, not {requested}; None chooses for the machine")
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    limit = min(processors, max(1, _free_memory() // BYTES_A_WORKER))
    if rows is not None:
        limit = min(limit, max(1, rows // ROWS_A_WORKER))
    return limit if requested is None else min(requested, limit)


def _free_memory() -> int:
    """Return the bytes that are available without swapping, the page cache included."""
    meminfo = Path("/proc/meminfo")
    available = re.search(r"^MemAvailable: +(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    if available is not None:
        return 1024 * int(available[1])
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not known on this system
        return 8 << 30


def read_rows(paths: Sequence[str | Path]) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) from jsonl and parquet files; for a line that is no JSON, the error in place of the row."""
    for path in map(Path, paths):
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix in (".jsonl", ".json"):
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield f"{path.name}:{number}", _json(line)
        else:
            raise ValueError(f"{path}: the file has to end in .jsonl or .parquet")


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(missing_extra_message("parquet files need pyarrow", "data")) from error
    number = 0
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                yield f"{path.name}:{number}", row
                number += 1


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        return error


def _without_null(value: Any) -> Any:
    """Drop keys that are null: a parquet column gives every message the keys of all."""
    if isinstance(value, dict):
        return {key: _without_null(item) for key, item in value.items() if item is not None}
    return [_without_null(item) for item in value] if isinstance(value, list) else value


def tokenize_row(row: Any, tokenizer: Any, options: DatasetOptions) -> tuple[list[int], list[bool]] | str:
    """Return the ids and mask of one row, or the reason why it is skipped."""
    if isinstance(row, ValueError):
        return "not valid JSON"
    if not isinstance(row, dict):
        return "not an object"
    messages, tools = (
        _json(value) if isinstance(value, str) else _without_null(value)
        for value in (row.get(options.messages), row.get(options.tools))
    )
    if not isinstance(messages, list) or not messages:
        return f"no list of messages in {options.messages!r}"
    if not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages):
        return "a message without a role"
    try:
        rendered = render(
            tokenizer, messages, tools or None, stop_tokens=options.stop_tokens, **options.template_options
        )
    except template_errors() as error:
        return f"the template refuses it: {error}"
    except (TypeError, ValueError) as error:  # content of a type that the template cannot join to text
        return f"it cannot be rendered: {type(error).__name__}: {error}"
    if options.strict and rendered.problems:
        return f"{PROBLEM}: {rendered.problems[0].partition(': ')[2] or rendered.problems[0]}"
    if options.max_length is not None and len(rendered.ids) > options.max_length:
        return f"longer than {options.max_length} tokens"
    if not any(rendered.assistant_mask):
        return "nothing to train: no assistant message"
    return rendered.ids, rendered.assistant_mask


_worker: tuple[Any, DatasetOptions] | None = None


def _start_worker(tokenizer: Any, options: DatasetOptions) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = tokenizer, options


def _work(rows: list[Any]) -> list[tuple[list[int], list[bool]] | str]:
    assert _worker is not None
    return [tokenize_row(row, *_worker) for row in rows]


def tokenize_dataset(
    paths: Sequence[str | Path],
    tokenizer: Any,
    options: DatasetOptions | None = None,
    *,
    workers: int | None = None,
    total: int | None = None,
    progress: Progress | None = None,
    report: DatasetReport | None = None,
) -> Iterator[Example]:
    """Tokenise the conversations of jsonl and parquet files, in order, a few tasks ahead of the consumer.

    `report` is filled as rows come; `progress` is called with (rows done, `total`); `progress_bar(...)` makes one.
    `workers` None chooses for the machine; a request for more than it has is reduced, and the report says so.
    """
    options = options or DatasetOptions()
    report = DatasetReport() if report is None else report
    report.workers = usable_workers(workers, total)
    start = time.monotonic()
    for place, result in _results(read_rows(paths), tokenizer, options, report.workers):
        if isinstance(result, str):
            report.skip(result, place)
        else:
            report.kept += 1
            report.tokens += len(result[0])
            report.trained_tokens += sum(result[1])
            yield Example(report.rows, *result)
        report.rows += 1
        report.seconds = time.monotonic() - start
        if progress is not None:
            progress(report.rows, total)


def _results(
    rows: Iterable[tuple[str, Any]], tokenizer: Any, options: DatasetOptions, workers: int
) -> Iterator[tuple[str, tuple[list[int], list[bool]] | str]]:
    if workers == 1:
        for place, row in rows:
            yield place, tokenize_row(row, tokenizer, options)
        return
    source = iter(rows)
    tasks = iter(lambda: list(itertools.islice(source, ROWS_A_TASK)), [])
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, _start_worker, (tokenizer, options)) as pool:
        running: list[tuple[list[str], Future[Any]]] = []
        for task in itertools.chain(tasks, itertools.repeat(None)):
            if task is not None:
                running.append(([place for place, _ in task], pool.submit(_work, [row for _, row in task])))
                if len(running) < 3 * workers:
                    continue
            elif not running:
                return
            places, future = running.pop(0)
            yield from zip(places, future.result(), strict=True)


def progress_bar(title: str = "tokenising") -> Progress:
    """Return a progress callback that draws a bar (needs tqdm), or plain lines where there is no terminal."""
    if not sys.stderr.isatty():
        return _plain_progress(title)
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        return _plain_progress(title)
    bar = tqdm(desc=title, unit=" rows")

    def show(done: int, total: int | None) -> None:
        bar.total = total
        bar.update(done - bar.n)
        if done == total:
            bar.close()  # draws the end, which may have come too soon after the last row drawn

    return show


def _plain_progress(title: str) -> Progress:
    last = time.monotonic()

    def show(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last > 10 or done == total:
            last = time.monotonic()
            print(f"{title}: {done}{f' of {total}' if total else ''} rows", file=sys.stderr, flush=True)

    return show


def write_parquet(examples: Iterable[Example], path: str | Path, rows_a_group: int = 1000) -> int:
    """Write examples to a parquet file with columns row, input_ids, loss_mask; return their number."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ValueError(missing_extra_message("parquet files need pyarrow", "data")) from error
    integers, booleans = pa.list_(pa.int32()), pa.list_(pa.bool_())
    schema = pa.schema([("row", pa.int64()), ("input_ids", integers), ("loss_mask", booleans)])
    count = 0
    iterator = iter(examples)
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(itertools.islice(iterator, rows_a_group)):
            columns = {
                "row": [e.row for e in group],
                "input_ids": [e.ids for e in group],
                "loss_mask": [e.loss_mask for e in group],
            }
            writer.write_table(pa.table(columns, schema))
            count += len(group)
    return count
