"""Files as samples: tokenised, measured, cut and split; rows that were left out or cut are counted by their reason."""

import hashlib
import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.cli.refusals import Refusals
from apps.common.data.files import data_files
from apps.common.data.rows import place_of
from apps.quickstart.arithmetic import distinct, problems
from apps.quickstart.demonstrations import demonstration
from apps.sft.config import DataConfig
from apps.sft.reading.selection import Samples, Usable, usable_of
from apps.sft.reading.sources import Source
from apps.sft.reading.split import split_against, split_off
from apps.sft.reading.tokenized import silent, tokenize_file
from rollout import calculator
from rollout.chat.images import ImageProcessor


@dataclass(slots=True)
class Skipped:
    """The number of rows that were left out or cut for each reason, and the first of each."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, path: Path, row: int, detail: str = "") -> None:
        """Count a row that was left out; `detail` says more of it."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, f"{path.name}, {place_of(path, row)}{detail and f': {detail}'}")

    def lines(self) -> list[str]:
        """Return one line a reason."""
        left_out = [
            f"left out {count} rows: {reason} (first: {self.first[reason]})" for reason, count in self.counts.items()
        ]
        return left_out + [f"cut {count} rows of {name}" for name, count in self.cut.items()]


@dataclass(frozen=True)
class Conversations:
    """The samples to train on and held out, and the rows that were left out.

    Rows read = len(train) + len(held_out) + the sum of `skipped.counts`, over all files. `sizes`: how many of `train`
    are from each file, in order; `weights`: the files' shares where they are given. `files`: the name of each file, and
    a digest of its rows in `train`, in order.
    """

    train: Samples
    held_out: Samples
    skipped: Skipped
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    files: tuple[tuple[str, str], ...] = ()


def load_conversations(
    config: DataConfig,
    sources: Sequence[Source],
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: tuple[str, ...] | None = None,
    cache: Path = Path("tokens"),
    image_processor: ImageProcessor | None = None,
    images_column: str | None = None,
    log_line: Callable[[str], None] = silent,
) -> Conversations:
    """Read the sources and, where they are given, the held-out files.

    Identical rows are on one side: without a held-out file a share of the different ones is held out; what is in a
    held-out file of its own is removed from the training rows, and counted. `stop_tokens`: see
    `samples.encode_messages`. `cache`: where tokens are kept, see `reading.tokenized`. `image_processor`: reads images,
    where the model sees; they may be in `images_column`, "images" unless it is named. `log_line`: see
    `tokenize_file`.

    Raises:
        ValueError: a file or a row can't be used, or too little is left; the text names the row and the remedy.
    """
    skipped = Skipped()
    columns = config.columns if image_processor is None else replace(config.columns, images=images_column or "images")

    def usable(path: Path) -> Usable:
        how = (config.data_processes, image_processor, config.bad_rows, log_line)
        store = tokenize_file(path, columns, tokenizer, stop_tokens, cache, *how)
        selected = usable_of(store, config.max_tokens, config.truncation)
        problems = {int(store.rows[i]): why for i, why in store.problems.items()}
        for reason, rows in selected.left_out:
            for row in rows:
                skipped.add(reason, path, row, problems.get(row, ""))
        if selected.cut:
            skipped.cut[f"{path.name} at the {config.truncation}, to --max-tokens {config.max_tokens}"] = selected.cut
        return selected

    parts = [data_files(source.path) for source in sources]
    others = [] if config.eval_data is None else [*data_files(config.eval_data)]
    files, apart = _all_read(usable, [path for part in parts for path in part], others)
    owners = [(number, path) for number, part in enumerate(parts) for path in part]
    keys = [key for file in files for key in file.keys]
    own, keys_apart = config.eval_data is None, [key for other in apart for key in other.keys]
    split = split_off(keys, *config.held_out) if own else split_against(keys, keys_apart)
    held_out = Samples.of(files if own else apart, split.held_out, image_processor)
    places = [(*owner, row) for owner, file in zip(owners, files, strict=True) for row in file.rows]
    for i in split.removed:
        _, path, row = places[i]
        skipped.add(f"also in {config.eval_data}, which is held out", path, row)
    of_files = [[keys[i] for i in split.train if places[i][0] == number] for number in range(len(sources))]
    sizes = tuple(map(len, of_files))
    weights = tuple(source.weight for source in sources if source.weight is not None)
    names = tuple((source.path.name, _digest(rows)) for source, rows in zip(sources, of_files, strict=True))
    conversations = Conversations(
        Samples.of(files, split.train, image_processor), held_out, skipped, sizes, weights or None, names
    )
    if not all(sizes) or not conversations.held_out:
        short = sources[sizes.index(0) if 0 in sizes else 0].path
        raise ValueError(_too_few(short, conversations, len(set(keys))))
    return conversations


def _all_read(
    usable: Callable[[Path], Usable], paths: Sequence[Path], others: Sequence[Path]
) -> tuple[list[Usable], list[Usable]]:
    """Return what can be used of the training files and of the held-out ones; ValueError: all that is wrong."""
    refusals = Refusals()
    refusals.of(partial(_check_once, paths))
    read = [refusals.of(partial(usable, path)) for path in [*paths, *others]]
    refusals.tell()
    files = [file for file in read if file is not None]
    return files[: len(paths)], files[len(paths) :]


def write_demonstrations(config: DataConfig, seed: int, path: Path) -> Path:
    """Write the synthetic task's demonstrations as a file of conversations."""
    digits = 2 if config.task == "arithmetic" else 3
    stream = problems(random.Random(seed), digits)
    count = min(config.demonstrations, 10 ** (2 * digits) // 2)
    tools = [calculator().schema] if config.task == "calculator" else None
    rows = ({"messages": demonstration(p, config.task), "tools": tools} for p in distinct(stream, count))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
    return path


def _check_once(paths: Sequence[Path]) -> None:
    twice = [path for i, path in enumerate(paths) if path in paths[:i]]
    if twice:
        raise ValueError(
            f"--data: {twice[0]} is read twice: name it once, with a weight where it is to be read more often"
        )


def _digest(keys: Sequence[str]) -> str:
    return hashlib.blake2b("".join(keys).encode(), digest_size=8).hexdigest()


def _too_few(path: Path, conversations: Conversations, different: int) -> str:
    reasons: Sequence[str] = conversations.skipped.lines() or ["none was left out"]
    return (
        f"{path}: {len(conversations.train)} rows to train on and {len(conversations.held_out)} held out are too few; "
        f"{different} different ones can be used ({'; '.join(reasons)})"
    )
