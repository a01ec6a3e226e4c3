"""The formats of a row: a conversation (messages, ShareGPT, Alpaca), a prompt with its completion, text, or tokens."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apps.common.data.rows import Row, error_text, kind_of, named, stream_records
from apps.sft.reading.columns import Columns as Columns
from apps.sft.reading.columns import Form as Form
from apps.sft.reading.conversations import (
    Conversation,
    Message,
    check_no_media,
    conversation_of,
    digest,
    list_of,
    messages_of,
    shown,
    tools_of,
    with_system,
)

ALPACA = ("instruction", "input", "output", "system", "history")
"""The columns of Alpaca's rows; `input`, `system` and `history` may be missing or empty."""
IDS = "input_ids"
TOKEN_WEIGHTS = ("labels", "loss_mask", "assistant_masks", "completion_mask", "loss_weights")
"""The columns of rows of tokens that say what is trained of them, those of transformers and TRL too."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A prompt and its completion; the prompt may be empty: plain text."""

    row: int
    prompt: str
    text: str

    @property
    def key(self) -> str:
        """A digest of the content."""
        return digest([self.prompt, self.text])


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that can't be used, and why."""

    row: int
    problem: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens and their weights, 0 where one is not trained."""

    row: int
    ids: tuple[int, ...]
    weights: tuple[float, ...]

    @property
    def key(self) -> str:
        """A digest of the content."""
        return digest([self.ids, self.weights])


Example = Conversation | Completion | Tokens


def read_examples(path: Path, columns: Columns) -> Iterator[Example | BadRow]:
    """Yield the rows of a data file, checked.

    A prompt and its completion are both texts, or both lists of messages.

    Raises:
        ValueError: the file can't be read.
    """
    columns = replace(columns, form=form_of_file(path, columns)[0])
    parquet = kind_of(path) == ".parquet"
    for record in stream_records(path):
        try:
            if record.row is None:
                raise ValueError(record.problem)
            plain: Row = without_nulls(record.row) if parquet else record.row
            yield _example(record.number, plain, columns)
        except ValueError as error:
            yield BadRow(record.number, str(error))


def form_of_file(path: Path, columns: Columns) -> tuple[Form, Row]:
    """Return the form of a file's rows, decided by the first that can be read unless it is given, and that row.

    Raises:
        ValueError: the file or all of its rows can't be read, or the row has the columns of no form.
    """
    problems: list[str] = []
    for record in stream_records(path):
        place = named(path, record.number)
        if record.row is None:
            problems.append(f"{place}: {record.problem}")
            continue
        plain = without_nulls(record.row) if kind_of(path) == ".parquet" else record.row
        if columns.form != "auto":
            return columns.form, plain
        try:
            return _form_of(plain, columns), plain
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    raise ValueError(error_text(path, problems))


def description_of(form: Form, columns: Columns, row: Row) -> str:
    """Return a form with the columns that are read of a row, and those that are not."""
    reads = {
        "messages": (columns.messages, columns.tools),
        "sharegpt": (columns.conversations, "system", columns.tools),
        "alpaca": (*ALPACA, columns.tools),
        "prompt_completion": (columns.prompt, columns.completion, columns.tools),
        "text": (columns.text,),
        "tokens": (IDS, *TOKEN_WEIGHTS),
    }[form]
    reads = (*reads, columns.images) if columns.images and form != "text" else reads
    other = [name for name in row if name not in reads]
    return (
        f"{NAMES[form]} rows, of which {', '.join(name for name in row if name in reads) or 'nothing'} is read"
        f"{', and not ' + ', '.join(other) if other else ''}"
    )


NAMES = {
    "messages": "OpenAI messages",
    "sharegpt": "ShareGPT",
    "alpaca": "Alpaca",
    "prompt_completion": "prompt and completion",
    "text": "plain text",
    "tokens": "token",
}


def _form_of(row: Row, columns: Columns) -> Form:
    if IDS in row:
        return "tokens"
    if columns.messages in row:
        return "messages"
    if columns.conversations in row:
        return "sharegpt"
    if columns.prompt in row and columns.completion in row:
        return "prompt_completion"
    if "instruction" in row and "output" in row:
        return "alpaca"
    if columns.text in row:
        return "text"
    raise ValueError(
        f"no column {columns.messages!r} or 'conversations', nor {columns.prompt!r} and {columns.completion!r}, nor "
        f"'instruction' and 'output', nor {columns.text!r} or {IDS!r}; it has {', '.join(row) or 'none'}. Name yours "
        "with --messages-column, --prompt-column and --completion-column, or --text-column"
    )


def _example(number: int, row: Row, columns: Columns) -> Example:
    form = columns.form
    if form == "messages":
        return conversation_of(number, row, columns.messages, columns.tools, columns.images)
    if form == "sharegpt":
        return conversation_of(number, row, columns.conversations, columns.tools, columns.images, "system")
    if form == "alpaca":
        messages = with_system(row, shown(row, _alpaca_messages(row), columns.images), "system")
        return Conversation.of(number, messages, tools_of(row, columns.tools))
    if form == "text":
        check_no_media(row, columns.text)
        return Completion(number, "", _text(row, columns.text, "--text-column"))
    if form == "tokens":
        return _tokens(number, row)
    return _prompt_and_completion(number, row, columns)


def _tokens(number: int, row: Row) -> Tokens:
    """Return the tokens of a row; the columns that say what of them is trained must all hold, and weights multiply."""
    ids = list_of(row.get(IDS), f"column {IDS!r}: expected a list of token ids")
    if not ids or not all(type(token) is int and token >= 0 for token in ids):
        raise ValueError(f"column {IDS!r}: expected token ids, got {ids!r:.60}")
    weights = [1.0] * len(ids)
    for name in TOKEN_WEIGHTS:
        if row.get(name) is None:
            continue
        values = list_of(row[name], f"column {name!r}: expected a list of numbers")
        if len(values) != len(ids):
            raise ValueError(f"column {name!r} has {len(values)} values for {len(ids)} token ids")
        if name == "labels":
            if bad := [i for i, value in enumerate(values) if value not in (-100, ids[i])]:
                raise ValueError(f"column 'labels', token {bad[0]}: {values[bad[0]]!r} is neither its id nor -100")
            values = [value != -100 for value in values]
        for value in values:
            if not isinstance(value, bool | int | float) or not 0 <= value < math.inf:
                raise ValueError(f"column {name!r}: expected numbers of at least 0, got {value!r:.60}")
        weights = [weight * value for weight, value in zip(weights, values, strict=True)]
    return Tokens(number, tuple(ids), tuple(weights))


def _alpaca_messages(row: Row) -> tuple[Message, ...]:
    """Return the turns of an Alpaca row: what was asked and answered before, then the instruction and its output."""
    more = row.get("input") or ""
    if not isinstance(more, str):
        raise ValueError(f"column 'input': expected a text, got {more!r:.60}")
    pairs = list_of(row.get("history") or [], "column 'history': expected a list of pairs")
    if not all(isinstance(pair, list) and len(pair) == 2 and all(isinstance(t, str) for t in pair) for pair in pairs):
        raise ValueError(f"column 'history': expected pairs of an instruction and its output, got {pairs!r:.60}")
    question = "\n\n".join(filter(None, [_text(row, "instruction"), more]))
    turns = [*pairs, [question, _text(row, "output")]]
    return tuple(
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    )


def _prompt_and_completion(number: int, row: Row, columns: Columns) -> Example:
    values = [row.get(name) for name in (columns.prompt, columns.completion)]
    if not any(isinstance(value, list) for value in values):
        check_no_media(row, columns.prompt, columns.completion)
        prompt = _text(row, columns.prompt, "--prompt-column", empty=True)
        return Completion(number, prompt, _text(row, columns.completion, "--completion-column"))
    for name, value in zip((columns.prompt, columns.completion), values, strict=True):
        if not isinstance(value, list):
            raise ValueError(
                f"column {name!r}: prompt and completion must be two texts or two lists of messages, got {value!r:.60}"
            )
    turns = [
        messages_of(
            list_of(row[name], f"column {name!r}: expected a list of messages"), f"column {name!r}", columns.images
        )
        for name in (columns.prompt, columns.completion)
    ]
    messages = shown(row, (*turns[0], *turns[1]), columns.images, columns.prompt, columns.completion)
    return Conversation.of(number, messages, tools_of(row, columns.tools), completes=len(turns[0]))


def _text(row: Row, column: str, flag: str = "", empty: bool = False) -> str:
    if column not in row:
        raise ValueError(f"no column {column!r}; it has {', '.join(row)}{flag and f'. Name yours with {flag}'}")
    value = row[column]
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"column {column!r}: expected a text that is not empty, got {value!r:.60}")
    return value


def without_nulls(value: Any) -> Any:
    """Return the value without null keys: in a Parquet file each message has the keys of all."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
