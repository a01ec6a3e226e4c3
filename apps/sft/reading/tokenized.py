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
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from apps.common.data.tokenizer import check_chat_template
from apps.sft.reading import conversations, examples, row_images, samples
from apps.sft.reading.conversations import Conversation
from apps.sft.reading.examples import Columns, Example, read_examples
from apps.sft.reading.samples import ImageError, UnverifiedMaskError, encode_messages, encode_text
from apps.sft.reading.store import SCHEMA, Entry, Store, in_parts, stamp_of, write_store
from chat_tools.rendering import render as rendering
from rollout.chat.images import ImageProcessor

PART, PART_BYTES = 256, 2**20
"""Rows that a process is given at once, and bytes of their texts and images, whichever come first."""
PARALLEL_BYTES = 4 * 2**20
"""Files below are tokenised in this process unless a number of processes is given: others take seconds to start."""


@dataclass(frozen=True)
class Encoder:
    """An encoder of the rows of one file into entries of a store."""

    path: Path
    tokenizer: PreTrainedTokenizerBase
    stop_tokens: tuple[str, ...] | None = None
    image_processor: ImageProcessor | None = None

    def entry(self, example: Example) -> Entry:
        """Tokenise a row.

        Raises:
            ValueError: the chat template or the tokenizer refuses it; the text names file and row.
        """
        try:
            if not isinstance(example, Conversation):
                return Entry(example.row, example.key, encode_text(self.tokenizer, example.prompt, example.text))
            encoded = encode_messages(
                self.tokenizer,
                example.messages,
                example.tools,
                self.stop_tokens,
                example.trained_from,
                self.image_processor,
            )
            return Entry(example.row, example.key, encoded, stamps=tuple(map(stamp_of, encoded.images)))
        except UnverifiedMaskError as error:
            # Token and message numbers differ from row to row, the reason does not.
            reason = f"its mask can't be proven: {re.sub(r'[0-9]+', 'N', str(error))}"
            return Entry(example.row, example.key, None, reason)
        except ImageError as error:
            raise ValueError(f"{self.path}, row {example.row}: {error}") from error
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            # A template that joins what is no text to text is a TypeError of Jinja's own making.
            who = "the chat template" if isinstance(example, Conversation) else "the tokenizer"
            what = "conversation" if isinstance(example, Conversation) else "text"
            raise ValueError(f"{self.path}, row {example.row}: {who} refuses the {what}: {error}") from error


def tokenize_file(
    path: Path,
    columns: Columns,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[str, ...] | None,
    folder: Path,
    processes: int | None = None,
    image_processor: ImageProcessor | None = None,
) -> Store:
    """Return the store of a file in `folder`; make it where it is not there yet.

    `processes`: how many tokenise; None for one a CPU where the file is large, else this one. `image_processor` reads
    the images of conversations: each is, so that none fails later.

    Raises:
        ValueError: the file or a row can't be used; the text names the row and the remedy.
    """
    if isinstance(next(read_examples(path, columns)), Conversation):
        check_chat_template(tokenizer)
    store = folder / f"{path.stem[:40]}-{fingerprint(path, columns, tokenizer, stop_tokens, image_processor)}.arrow"
    if not store.is_file() or not _has_its_images(path, Store(store)):
        if processes is None:
            processes = len(os.sched_getaffinity(0)) if path.stat().st_size > PARALLEL_BYTES else 1
        encoder = Encoder(path, tokenizer, stop_tokens, image_processor)
        rows = read_examples(path, columns)
        write_store(store, map(encoder.entry, rows) if processes == 1 else _in_processes(encoder, rows, processes))
    return Store(store)


def _has_its_images(path: Path, store: Store) -> bool:
    """Return whether the images of a tokenised file are still those that were tokenised.

    Raises:
        ValueError: an image's file is no longer there.
    """
    for number in map(int, np.flatnonzero(store.shown)):
        for image, stamp in zip(store.images(number)[1], store.stamps(number), strict=True):
            try:
                if stamp_of(image) != stamp:
                    return False
            except FileNotFoundError:
                raise ValueError(f"{path}, row {store.rows[number]}: there is no image {image}") from None
    return True


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
    files = [Path(str(module.__file__)) for module in (samples, conversations, examples, row_images)]
    files += sorted(Path(str(rendering.__file__)).parent.glob("*.py"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=16).hexdigest()


def _in_processes(encoder: Encoder, rows: Iterator[Example], processes: int) -> Iterator[Entry]:
    """Yield the entries in order, with at most a few parts a process under way."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_start, initargs=(encoder,))
    waiting: deque[Future[list[Entry]]] = deque()
    try:
        for part in in_parts(rows, PART, PART_BYTES, _size_of):
            waiting.append(pool.submit(_encode, part))
            if len(waiting) > 4 * processes:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _size_of(example: Example) -> int:
    """Return the characters of a row, with images as `data:` URIs."""
    if isinstance(example, Conversation):
        return _characters(example.messages)
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


def _encode(part: list[Example]) -> list[Entry]:
    return [_ENCODER[0].entry(example) for example in part]
