"""Fetch a data set and lay it down as files that --data takes:

bazel run //apps/grpo:prepare -- --source gsm8k --out data/gsm8k

A source is a preset's name, OWNER/NAME on a Hugging Face hub, or a local directory. What is written lies in a folder of
OUT for each source, subset and revision, what was fetched in OUT/download in one for each source and revision; both
stay, so that a second start goes on where the first was stopped. Where the hub is and who asks are huggingface_hub's
own variables (HF_ENDPOINT, HF_TOKEN, HF_HOME).
"""

from __future__ import annotations

import filecmp
import hashlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from apps.common.cli.command_line import main as run_command
from apps.common.cli.command_line import user_directory
from apps.common.data.presets import PRESETS
from apps.common.program import command, program

if TYPE_CHECKING:  # help and wrong flags need no data library
    import datasets

ALL = "all"  # as a subset: every configuration, laid together
WORKERS = 8  # files that are fetched at a time where nobody says how many
DATA_FILES = ("*.parquet", "*.jsonl", "*.json", "*.csv", "README.md")


@dataclass(frozen=True)
class Prepare:
    """Fetch a data set and write each of its splits as a Parquet file."""

    source: str
    """gsm8k, math, aime or geo3k; OWNER/NAME of a data set on the hub; or a directory."""
    out: Path
    """Where a folder with SPLIT.parquet is written, of its own for each source, subset and revision."""
    subset: str | None = None
    """The configuration of a data set that has several; "all" lays them together."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    workers: int = WORKERS
    """Files fetched at a time, no more than there are cores; they are read one after another."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")


def prepare(config: Prepare) -> dict[str, Path]:
    """Fetch and write what is missing; return the file of each split.

    Raises:
        ValueError: there is no such data set or subset, it has no rows, or the hub can't be reached; the text says
            what to do.
    """
    import datasets  # slow to load

    preset = PRESETS.get(config.source)  # type: ignore[call-overload]
    config.out.mkdir(parents=True, exist_ok=True)
    source, subset = Path(config.source), config.subset or (preset.subset if preset else None)
    if preset is None and source.is_dir():
        if config.revision is not None:
            raise ValueError("--revision has no effect on a directory: leave it out")
    else:
        source = _fetch(preset.repository if preset else config.source, config)
    try:
        splits = _splits(source, subset, config.out / "cache")
    except (ValueError, FileNotFoundError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{config.source} can't be read: {' '.join(str(error).split())[:400]}") from error
    place = str(source.resolve()) if preset is None and Path(config.source).is_dir() else config.source
    folder = config.out / _key(place, subset, config.revision)
    folder.mkdir(exist_ok=True)
    return {name: _write(rows, folder / f"{name}.parquet") for name, rows in splits.items()}


def _splits(source: Path, subset: str | None, cache: Path) -> dict[str, datasets.Dataset]:
    """Return the rows of each split: of one configuration, or of all of them in the order of their names.

    ValueError: there are several configurations and none is named, or they have different columns.
    """
    import datasets  # slow to load

    names = sorted(datasets.get_dataset_config_names(str(source)))
    if subset is None and len(names) > 1:
        raise ValueError(f"it has several configurations ({', '.join(names)}): name one with --subset, or --subset all")
    chosen = names if subset == ALL and ALL not in names else [subset]
    parts: dict[str, list[datasets.Dataset]] = {}
    for name in chosen:
        for split, rows in datasets.load_dataset(str(source), name, cache_dir=str(cache), num_proc=None).items():
            parts.setdefault(str(split), []).append(rows)
    return {split: rows[0] if len(rows) == 1 else datasets.concatenate_datasets(rows) for split, rows in parts.items()}


def _key(source: str, *others: str | None) -> str:
    """Return a folder's name: the source's usual name and a digest that is different for every source."""
    digest = hashlib.blake2b(repr((source, *others)).encode(), digest_size=4).hexdigest()
    words = [re.sub(r"[^A-Za-z0-9.]+", "-", word).strip("-.") for word in (Path(source).name, *filter(None, others))]
    return "-".join([*words, digest])


def _fetch(repository: str, config: Prepare) -> Path:
    """Return the data files of a repository in a folder of OUT/download; fetch those that are not there yet."""
    from huggingface_hub import snapshot_download  # slow to load
    from huggingface_hub.errors import (  # slow to load
        EntryNotFoundError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
    )

    folder = config.out / "download" / _key(repository, config.revision)
    try:
        snapshot_download(
            repository,
            repo_type="dataset",
            revision=config.revision,
            local_dir=folder,
            allow_patterns=list(DATA_FILES),
            max_workers=min(config.workers, os.cpu_count() or 1),
        )
    except HFValidationError as error:
        raise ValueError(
            f"--source {repository!r} is no directory, no preset ({', '.join(PRESETS)}) and no OWNER/NAME"
        ) from error
    except (HfHubHTTPError, EntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ValueError(
            f"{repository} can't be fetched ({type(error).__name__}: {' '.join(str(error).split())[:300]}). What is in "
            f"{folder} stays: start again to go on, or name a directory that holds its files"
        ) from error
    return folder


def _write(rows: datasets.Dataset, path: Path) -> Path:
    """Write a whole split or nothing; a file that holds the same rows stays as it is."""
    if not len(rows):
        raise ValueError(f"the split {path.stem} has no rows")
    partial = path.with_suffix(".writing")
    rows.to_parquet(str(partial))
    if path.is_file() and filecmp.cmp(partial, path, shallow=False):
        partial.unlink()
    else:
        os.replace(partial, path)
    return path


def main(argv: Sequence[str]) -> None:
    """Prepare what the command line asks for, and print the flags that use it."""
    user_directory()
    config = tyro.cli(Prepare, args=list(argv), prog=program("prepare"))
    files = prepare(config)
    for name, path in files.items():
        sys.stdout.write(f"{name}: {path}\n")
    held_out = next((files[name] for name in ("test", "validation") if name in files), None)
    flags = f"--preset {config.source} " if config.source in PRESETS else ""
    flags += f"--data {files.get('train', next(iter(files.values())))}"
    flags += f" --eval-data {held_out}" if held_out is not None and "train" in files else ""
    sys.stdout.write(f"now: {command('grpo')} --model DIR {flags}\n")


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
