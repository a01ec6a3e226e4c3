"""The files behind a name of --data: a file, a directory, a pattern, or a data set of the Hugging Face hub.

A directory and a data set may hold several splits (train, test, ...), told apart by the names of files and folders;
one of them is read, never several as one.
"""

import difflib
import glob
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from apps.common.data.rows import SUFFIXES, kind_of

SPLITS = ("train", "training", "test", "testing", "eval", "evaluation", "validation", "valid", "val", "dev")
HUB_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[\w.-]+)(/(?P<subset>[\w.-]+))?(:(?P<split>[\w.+-]+))?")
"""OWNER/NAME[/SUBSET][:SPLIT]"""
_WORD = re.compile(r"[A-Za-z]+")
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})")


def data_files(name: str | Path) -> tuple[Path, ...]:
    """Return the files of FILE, DIRECTORY[:SPLIT], a glob PATTERN, or OWNER/NAME[/SUBSET][:SPLIT] of the hub.

    What exists on disk is taken first. A data set comes from the local cache of the hub, or through `datasets`.

    Raises:
        ValueError: there is no such file, directory or data set, or it has several splits and none is named.
    """
    text = str(name)
    if Path(text).is_file():
        return (Path(text),)
    place, _, split = text.rpartition(":") if ":" in text and not Path(text).exists() else (text, "", "")
    if Path(place).is_dir():
        return files_of_split(Path(place), split)
    if glob.has_magic(text):
        files = tuple(sorted(path for path in map(Path, glob.glob(text, recursive=True)) if path.is_file()))
        if not files:
            raise ValueError(f"no data file matches {text}")
        return files
    if match := on_hub(text):
        from apps.common.data.hub import snapshot_of  # slow to load

        snapshot = snapshot_of(match["repository"], match["subset"], match["split"] or "train")
        return (
            (snapshot,) if snapshot.is_file() else files_of_split(snapshot, match["split"] or "train", match["subset"])
        )
    near = difflib.get_close_matches(Path(text).name, [p.name for p in _beside(Path(text))], n=1)
    raise ValueError(f"no such data file: {text}{f'; did you mean {near[0]}?' if near else ''}")


def on_hub(name: str | Path) -> re.Match[str] | None:
    """Return the parts of a data set's name on the hub; None where it is of a place on this disk."""
    path = Path(name)
    if path.exists() or kind_of(path) is not None or path.parent.is_dir():
        return None
    return HUB_NAME.fullmatch(str(name))


def file_problems(names: Iterable[str | Path], read: Callable[[Path], object]) -> list[str]:
    """Return what is wrong with files behind these names, before anything else needs them: which are missing, and
    those that `read` refuses. Data sets of the hub are left for later: nothing is fetched.

    Args:
        names: names as `data_files` takes them.
        read: raises ValueError for a file that can't be used.
    """
    problems: list[str] = []
    for name in names:
        if on_hub(name):
            continue
        try:
            files = data_files(name)
        except ValueError as error:
            problems.append(str(error))
            continue
        for path in files:
            try:
                read(path)
            except ValueError as error:
                problems.append(str(error))
    return problems


def files_of_split(directory: Path, split: str = "", subset: str | None = None) -> tuple[Path, ...]:
    """Return the data files of a directory, sorted: those of a split where it is named.

    The `configs` of a README.md say which files a subset and a split have; else the names of files and folders do.

    Raises:
        ValueError: there are none, or of several splits or subsets without one being named.
    """
    files = sorted(
        path for path in directory.rglob("*") if path.is_file() and kind_of(path) and _shown(path, directory)
    )
    if not files:
        raise ValueError(f"{directory} has no data files (names ending in {', '.join(SUFFIXES)}, perhaps with .gz)")
    patterns = _patterns(directory, subset)
    if patterns is not None:
        by_split = {
            name: [path for path in files if any(fnmatch(_inside(path, directory), p) for p in chosen)]
            for name, chosen in patterns.items()
        }
    else:
        if subset is not None:
            files = [path for path in files if subset in Path(_inside(path, directory)).parts]
            if not files:
                raise ValueError(f"{directory} has no subset {subset!r}: no folder of that name")
        by_split = {}
        for path in files:
            by_split.setdefault(split_of(_inside(path, directory)), []).append(path)
    chosen = _chosen(by_split, split, directory)
    _check_shards(chosen)
    return tuple(chosen)


def split_of(name: str) -> str:
    """Return the split that a file's path names by a word of its own ("data/train-00000-of-00001.parquet"), or ""."""
    words = [word.lower() for word in _WORD.findall(name)]
    return next((word for word in reversed(words) if word in SPLITS), "")


def _check_shards(files: Sequence[Path]) -> None:
    """Raise ValueError where some of the files that are numbered as parts of one are missing."""
    parts: dict[str, set[str]] = {}
    for path in files:
        if match := _SHARD.search(path.name):
            parts.setdefault(f"{path.parent / path.name[: match.start()]}-...-of-{match[2]}", set()).add(match[1])
    for name, numbers in parts.items():
        if len(numbers) < int(name[-5:]):
            raise ValueError(f"{name}: {len(numbers)} of {int(name[-5:])} parts are here: fetch the others")


def _chosen(by_split: dict[str, list[Path]], split: str, directory: Path) -> list[Path]:
    names = sorted(name for name in by_split if name)
    if split and split in by_split:
        return by_split[split]
    if len(by_split) == 1 and (not split or (split == "train" and not names)):
        return next(iter(by_split.values()))
    said = f"has no split {split!r}" if split else "holds several splits"
    there = f"there are {', '.join(names)}" if names else "its files name none"
    raise ValueError(f"{directory} {said}: {there}; name one after a colon, DIRECTORY:{names[0] if names else 'train'}")


def _patterns(directory: Path, subset: str | None) -> dict[str, list[str]] | None:
    """Return the patterns of files of each split that the head of README.md lists; None where it lists none."""
    configs = [config for config in _configs(directory / "README.md") if config.get("data_files")]
    if not configs:
        return None
    by_name = {str(config.get("config_name", "default")): config for config in configs}
    name = subset or next((n for n, config in by_name.items() if config.get("default") or n == "default"), None)
    if name is None and len(by_name) == 1:
        name = next(iter(by_name))
    if name not in by_name:
        said = f"has no subset {subset!r}" if subset else "has several subsets"
        raise ValueError(f"{directory} {said}: name one of {', '.join(by_name)}, as OWNER/NAME/SUBSET")
    files = by_name[name]["data_files"]
    if isinstance(files, str) or (isinstance(files, list) and all(isinstance(item, str) for item in files)):
        return {"train": _listed(files)}
    return {str(item["split"]): _listed(item["path"]) for item in files}


def _listed(paths: Any) -> list[str]:
    return [str(path) for path in ([paths] if isinstance(paths, str) else paths)]


def _configs(readme: Path) -> Sequence[dict[str, Any]]:
    if not readme.is_file():
        return ()
    head = re.match(r"---\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    try:
        facts = yaml.safe_load(head[1]) if head else None
    except yaml.YAMLError:
        return ()
    configs = facts.get("configs") if isinstance(facts, dict) else None
    return [config for config in configs if isinstance(config, dict)] if isinstance(configs, list) else ()


def _inside(path: Path, directory: Path) -> str:
    return path.relative_to(directory).as_posix()


def _shown(path: Path, directory: Path) -> bool:
    return not any(part.startswith(".") for part in path.relative_to(directory).parts)


def _beside(path: Path) -> Iterable[Path]:
    return path.parent.glob("*") if path.parent.is_dir() else ()
