"""The forms of a row: a conversation, a prompt with its completion, or plain text."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apps.common.data.prompts import Row, stream_rows
from apps.sft.reading.conversations import (
    Conversation,
    check_no_media,
    conversation_of,
    digest,
    list_of,
    messages_of,
    shown,
    tools_of,
    without_nulls,
)

Form = Literal["auto", "messages", "prompt_completion", "text"]


@dataclass(frozen=True)
class Columns:
    """The columns of a file and the form of its rows; "auto" is decided by the first row."""

    form: Form = "auto"
    messages: str = "messages"
    tools: str = "tools"
    prompt: str = "prompt"
    completion: str = "completion"
    text: str = "text"
    images: str | None = None
    """Where images of conversations may be besides their messages; None where the model is trained on text alone."""


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


Example = Conversation | Completion


def read_examples(path: Path, columns: Columns) -> Iterator[Example]:
    """Yield the rows of a .jsonl or .parquet file, checked.

    A prompt and its completion are both texts, or both lists of messages: then only the assistant's turns of the
    completion are trained. Of a plain text every token is.

    Raises:
        ValueError: the file or a row can't be used; the text names file, row and the remedy.
    """
    form = columns.form
    for number, row in enumerate(stream_rows(path), start=1):
        try:
            plain: Row = without_nulls(row) if path.suffix == ".parquet" else row
            form = _form_of(plain, columns) if form == "auto" else form
            yield _example(number, plain, form, columns)
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from error


def _form_of(row: Row, columns: Columns) -> Form:
    if columns.messages in row:
        return "messages"
    if columns.prompt in row and columns.completion in row:
        return "prompt_completion"
    if columns.text in row:
        return "text"
    raise ValueError(
        f"no column {columns.messages!r}, nor {columns.prompt!r} and {columns.completion!r}, nor {columns.text!r}; it "
        f"has {', '.join(row)}. Name yours with --messages-column, --prompt-column and --completion-column, or "
        "--text-column"
    )


def _example(number: int, row: Row, form: Form, columns: Columns) -> Example:
    if form == "messages":
        return conversation_of(number, row, columns.messages, columns.tools, columns.images)
    if form == "text":
        check_no_media(row, columns.text)
        return Completion(number, "", _text(row, columns.text, "--text-column"))
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
    return Conversation(number, messages, tools_of(row, columns.tools), trained_from=len(turns[0]))


def _text(row: Row, column: str, flag: str, empty: bool = False) -> str:
    if column not in row:
        raise ValueError(f"no column {column!r}; it has {', '.join(row)}. Name yours with {flag}")
    value = row[column]
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f"column {column!r}: expected a text that is not empty, got {value!r:.60}")
    return value
