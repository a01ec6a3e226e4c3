"""Tokenise a file once: in parallel, into a store whose name depends on all its inputs.

1. The name is a digest of the file's bytes, the tokenizer with its template and stop tokens, the columns, and the code
   and versions that turn rows into tokens. Where a store of that name is there, nothing else is done.
2. Rows are read as a stream and sent to processes in parts of so many rows or bytes; no more than a few parts a
   process are under way at once, and results are written in the order of the rows.
3. A store is made anew where an image's file has another size or modification time than when it was read.

What does not change a row's tokens (longest length, split, mixture) is decided later, from the store.
"""

import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from apps.common.data import rows
from apps.common.data.rows import Row, error_text, named, place_of
from apps.common.data.tokenizer import check_chat_template
from apps.sft.reading import conversations, examples, marks, row_images, samples, trained
from apps.sft.reading.columns import BadRows
from apps.sft.reading.conversations import Conversation
from apps.sft.reading.examples import BadRow, Columns, Example, Tokens, description_of, form_of_file, read_examples
from apps.sft.reading.marks import READ
from apps.sft.reading.samples import Encoded, ImageError, UnverifiedMaskError, encode_messages, encode_text
from apps.sft.reading.store import (
    NO_KEY,
    SCHEMA,
    Entry,
    Store,
    batches_of,
    in_parts,
    record_batch,
    stamp_of,
    write_batches,
)
from apps.sft.reading.trained import TrainOn, trained_of
from chat_tools import Renderer, reasoning_format
from chat_tools.rendering import render as rendering
from chat_tools.rendering.template import tokens_as_text
from rollout.chat.images import ImageProcessor, images_of

PART, PART_BYTES = 256, 2**20
"""Rows that a process is given at once, and bytes of their texts and images, whichever come first."""
MISSING = "missing"
"""The stamp of an image without a file."""
PARALLEL_BYTES = 4 * 2**20
"""Files below are tokenised in this process unless a number of processes is given: others take seconds to start."""


def silent(text: str) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Encoder:
    """An encoder of the rows of one file into entries of a store."""

    tokenizer: PreTrainedTokenizerBase
    columns: Columns
    stop_tokens: tuple[str, ...] | None = None
    image_processor: ImageProcessor | None = None

    def entry(self, example: Example | BadRow) -> Entry:
        """Tokenise a row; one that can't be used has its problem in place of tokens."""
        if isinstance(example, BadRow):
            return Entry(example.row, NO_KEY, None, problem=example.problem)
        try:
            if isinstance(example, Conversation):
                return self._of_conversation(example)
            everything = "all" in self.columns.train_on
            if isinstance(example, Tokens):
                return self._of_tokens(example, everything)
            encoded = encode_text(self.tokenizer, example.prompt, example.text, everything)
            return Entry(example.row, example.key, encoded)
        except UnverifiedMaskError as error:
            # Token and message numbers differ from row to row, the reason does not.
            reason = f"its mask can't be proven: {re.sub(r'[0-9]+', 'N', str(error))}"
            return Entry(example.row, example.key, None, reason)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template that joins what is no text to text is a TypeError of Jinja's own making.
            who = "the chat template" if isinstance(example, Conversation) else "the tokenizer"
            what = "conversation" if isinstance(example, Conversation) else "text"
            return Entry(example.row, NO_KEY, None, problem=f"{who} refuses the {what}: {error}")

    def _of_tokens(self, example: Tokens, everything: bool) -> Entry:
        if max(example.ids) >= len(self.tokenizer):
            problem = f"token {max(example.ids)} is none of the tokenizer's, which has {len(self.tokenizer)}"
            return Entry(example.row, NO_KEY, None, problem=problem)
        mask = [bool(number) and (everything or weight > 0) for number, weight in enumerate(example.weights)]
        weights = () if everything or {*example.weights} <= {0.0, 1.0} else example.weights
        return Entry(example.row, example.key, Encoded(example.ids, mask, weights=weights))

    def _of_conversation(self, example: Conversation) -> Entry:
        roles = [message["role"] for message in example.messages]
        try:
            usual = self.columns.train_on == ("assistant",) and not example.marks and example.completes is None
            choice = None if usual else trained_of(roles, self.columns.train_on, example.marks, example.completes)
        except ValueError as error:
            return Entry(example.row, NO_KEY, None, problem=str(error))
        unread = tuple(sorted({key for message in example.messages for key in message} - self._known))
        try:
            encoded = encode_messages(
                *(self._renderer, example.messages, example.tools, choice, self.image_processor),
                reasoning=self._reasoning,
                end_of_turn=self.columns.end_of_turn,
            )
            stamps = tuple(map(stamp_of, encoded.images))
        except ImageError as error:
            images = images_of(example.messages)
            seen = Encoded((), (), images=images)
            return Entry(example.row, NO_KEY, seen, stamps=tuple(map(_stamp_or_none, images)), problem=str(error))
        return Entry(example.row, example.key, encoded, stamps=stamps, unread=unread)

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.tokenizer, self.stop_tokens)

    @cached_property
    def _reasoning(self) -> tuple[float, str | None]:
        """The weight of reasoning, and the format that tells it where it is not 1."""
        weight = self.columns.reasoning_weight
        return weight, None if weight == 1 else reasoning_format(self.tokenizer)

    @cached_property
    def _known(self) -> frozenset[str]:
        """The keys of messages that need no word: those that are always read, and what the chat template speaks of."""
        return READ.union(re.findall(r"\w+", str(self.tokenizer.chat_template)))


def tokenize_file(
    path: Path,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[str, ...] | None,
    folder: Path,
    processes: int | None = None,
    image_processor: ImageProcessor | None = None,
    bad_rows: BadRows = "error",
    log_line: Callable[[str], None] = silent,
) -> Store:
    """Return the store of a file in `folder`; make it where it is not there yet.

    `processes`: how many tokenise; None for one a CPU where the file is large, else this one. `image_processor` reads
    the images of conversations: each is, so that none fails later. `say` is told the form of the rows, the progress
    after two seconds, and the keys of messages that nothing reads.

    Raises:
        ValueError: the file can't be used, or some of its rows can't and `bad_rows` is "error"; the text names them.
    """
    form, first = form_of_file(path, columns)
    columns = replace(columns, form=form)
    log_line(f"{path.name}: {description_of(form, columns, first)}")
    _check_choice(path, columns, first)
    if form == "tokens":
        pass  # they need no template and no end of sequence
    elif form not in ("text", "prompt_completion") or isinstance(first.get(columns.prompt), list):
        check_chat_template(tokenizer)
        if columns.end_of_turn is not None:
            tokens_as_text([columns.end_of_turn], tokenizer)  # a ValueError where it is not one token
    elif tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer names no end-of-sequence token; set eos_token in tokenizer_config.json")
    store = Store(
        folder / f"{path.stem[:40]}-{fingerprint(path, columns, tokenizer, stop_tokens, image_processor)}.arrow"
    )
    if not store.path.is_file() or not _has_its_images(path, store):
        if processes is None:
            processes = len(os.sched_getaffinity(0)) if path.stat().st_size > PARALLEL_BYTES else 1
        encoder = Encoder(tokenizer, columns, stop_tokens, image_processor)
        read = read_examples(path, columns)
        made = batches_of(map(encoder.entry, read)) if processes == 1 else _in_processes(encoder, read, processes)
        write_batches(store.path, _with_progress(made, path, log_line))
        store = Store(store.path)
    for key, (count, row) in store.unread.items():
        log_line(
            f"{path.name}: messages of {count} rows have {key!r}, which neither the chat template nor this app reads "
            f"(first: {place_of(path, row)})"
        )
    if store.problems and bad_rows == "error":
        places = [f"{named(path, int(store.rows[i]))}: {why}" for i, why in store.problems.items()]
        hint = "" if len(places) == 1 else " (--bad-rows skip leaves them out)"
        raise ValueError(error_text(path, places, hint))
    return store


def _check_choice(path: Path, columns: Columns, first: Row) -> None:
    """Raise ValueError where what is trained is chosen in a way that has no meaning for a file of texts or tokens."""
    flat = columns.form in ("text", "tokens")
    if not flat and not (columns.form == "prompt_completion" and not isinstance(first.get(columns.prompt), list)):
        return
    allowed: tuple[TrainOn, ...] = ("assistant", "all") if flat else ("assistant", "completion", "all")
    what = f"{path.name}, whose rows are {'tokens' if columns.form == 'tokens' else 'texts'} and not messages"
    if not set(columns.train_on) <= set(allowed):
        raise ValueError(
            f"--train-on {' '.join(columns.train_on)} has no meaning for {what}: leave it out, or use "
            f"{' or '.join(allowed[1:])}"
        )
    if columns.reasoning_weight != 1 or columns.end_of_turn is not None:
        raise ValueError(f"--reasoning-weight and --end-of-turn have no meaning for {what}: leave them out")


def _with_progress(batches: Iterable[Any], path: Path, log_line: Callable[[str], None]) -> Iterator[Any]:
    """Yield the batches; tell the rows so far after two seconds, and again each time that twice as many have passed."""
    started = time.perf_counter()
    count, due = 0, 2.0
    for batch in batches:
        yield batch
        count += batch.num_rows
        passed = time.perf_counter() - started
        if passed >= due:
            log_line(f"{path.name}: {count:,} rows tokenised in {passed:.0f} s")
            due = min(2 * passed, passed + 60)


def _has_its_images(path: Path, store: Store) -> bool:
    """Return whether the images of a tokenised file are still those that were tokenised.

    Raises:
        ValueError: an image's file is no longer there.
    """
    for number in map(int, np.flatnonzero(store.shown)):
        for image, stamp in zip(store.images(number)[1], store.stamps(number), strict=True):
            now = _stamp_or_none(image)
            if now == stamp:
                continue
            if now == MISSING and number not in store.problems:
                raise ValueError(f"{named(path, int(store.rows[number]))}: there is no image {image}")
            return False
    return True


def _stamp_or_none(image: str) -> str:
    try:
        return stamp_of(image)
    except OSError:
        return MISSING


def fingerprint(
    path: Path,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[str, ...] | None,
    image_processor: ImageProcessor | None = None,
) -> str:
    """Return a digest of everything that the tokens of a file depend on."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    facts = {
        "file": _digest_of(path),
        "kind": path.suffix,
        "columns": asdict(columns),
        "tokenizer": backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items()),
        "class": type(tokenizer).__name__,
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "template": tokenizer.chat_template,
        "stop_tokens": stop_tokens,
        "schema": str(SCHEMA),
        "versions": [transformers.__version__, tokenizers.__version__, jinja2.__version__],
        "code": _digest_of_code(),
        "pictures": None
        if image_processor is None
        else [str(image_processor.read), image_processor.merge_size, image_processor.token],
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=12).hexdigest()


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _digest_of_code() -> str:
    """Return a digest of the modules that turn rows into tokens: a store made by an older version is not used."""
    files = [
        Path(str(module.__file__)) for module in (samples, conversations, examples, row_images, marks, trained, rows)
    ]
    for folder in ("rendering", "parsing", "known_formats"):  # reasoning is told by parsing
        files += sorted((Path(str(rendering.__file__)).parents[1] / folder).glob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def _in_processes(encoder: Encoder, examples: Iterator[Example | BadRow], processes: int) -> Iterator[Any]:
    """Yield the record batches in order, with at most a few parts a process under way."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(encoder,))
    waiting: deque[Future[Any]] = deque()
    try:
        for part in in_parts(examples, PART, PART_BYTES, _size_of):
            waiting.append(pool.submit(_encode, part))
            if len(waiting) > 4 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _size_of(example: Example | BadRow) -> int:
    """Return the characters of a row, with images as `data:` URIs."""
    if isinstance(example, BadRow):
        return len(example.problem)
    if isinstance(example, Conversation):
        return _characters(example.messages)
    if isinstance(example, Tokens):
        return 8 * len(example.ids)
    return len(example.prompt) + len(example.text)


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return sum(map(_characters, parts))


_ENCODER: list[Any] = []
"""In a process of the pool: the encoder that it was started with."""


def _start(encoder: Encoder) -> None:
    _ENCODER.append(encoder)


def _encode(part: list[Example | BadRow]) -> Any:
    return record_batch([_ENCODER[0].entry(example) for example in part])
