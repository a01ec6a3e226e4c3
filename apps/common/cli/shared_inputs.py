"""Files that a command line names, for those machines of a run that lack them.

Machines without a shared disk need model, data and code at the same paths. Before the settings are read each file
travels once, from a machine that has it to all that lack it, with its SHA-256. What several machines have already must
be of one size, and files below 1 MiB of one content.
"""

import glob
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from apps.common.cli.extensions import points_of
from apps.common.cli.flag_names import flag
from apps.common.cli.yaml_config import load_yaml
from apps.common.run.config_file import CONFIG_NAME
from engines.storage.disks import find_disks, share_files
from engines.storage.together import gathered

_PATHS = ("recipe", "model", "data.data", "data.eval_data", "plugins.tasks", "teachers.teacher")
CONFIG = "--config"


def share_inputs(argv: Sequence[str], kind: type) -> None:
    """Give each machine the files that a command line of an app names and that another machine has. Collective.

    Args:
        argv: the words of the command line.
        kind: the app's configuration class.

    Raises:
        ValueError: a file differs between machines, or can't be written; the text names machine and file.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    dist.init_process_group("gloo", store=dist.PrefixStore("inputs", store), rank=rank, world_size=size)
    try:
        for words in (_words(argv, {CONFIG}), _words(argv, _input_flags(kind)), _of_config(argv, kind)):
            for path in _present(words):
                _share(path)
        if "--resume" in argv:  # machines that were in the run have it, each as it was at its last start
            for path in _present(f"{name}/{CONFIG_NAME}" for name in _words(argv, {"--run-dir"})):
                if not all(gathered(None, path.exists())):
                    _share(path)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    finally:
        dist.destroy_process_group()


def _input_flags(kind: type) -> set[str]:
    """Return the flags whose values may name files: model, data, and code of the user's."""
    return {flag(path) for path in _PATHS} | {flag(point.path) for point in points_of(kind)}


def _words(argv: Sequence[str], flags: set[str]) -> Iterator[str]:
    """Yield the words that follow some flags."""
    ours = False
    for word in argv:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            ours = name.replace("_", "-") in flags
            if ours and equals:
                yield value
        elif ours:
            yield word


def _of_config(argv: Sequence[str], kind: type) -> Iterator[str]:
    """Yield what the file of `--config` names in the same settings."""
    named = {*_PATHS, *(point.path for point in points_of(kind))}
    for name in _words(argv, {CONFIG}):
        settings = load_yaml(kind, kind(), Path(name), {}) if Path(name).is_file() else {}
        for value in (settings[path] for path in sorted(named & settings.keys())):
            yield from map(str, value if isinstance(value, tuple) else (value,))


def _places(word: str) -> Iterator[str]:
    """Yield the paths that a word may mean: PATH, PATH:NAME (code, a split, a weight), NAME=PATH, or a teacher's
    vllm:PATH and native:PATH."""
    whole = word.partition("=")[2] or word
    for text in dict.fromkeys((whole, whole.rpartition(":")[0], whole.removeprefix("vllm:").removeprefix("native:"))):
        if glob.has_magic(text):
            yield from sorted(glob.glob(text, recursive=True))
        elif text:
            yield text


def _present(words: Iterator[str]) -> list[Path]:
    """Return those of the paths that some machine has, in one order on all; collective."""
    here = [place for word in words for place in _places(word) if Path(place).exists()]
    return [Path(place) for place in dict.fromkeys(place for one in gathered(None, here) for place in one)]


def _share(path: Path) -> None:
    """Give a file or directory to the machines that lack it, and tell what came to this one."""
    facts: list[Any] = gathered(None, (socket.gethostname(), path.exists(), path.is_dir()))
    directory = any(is_dir for _, _, is_dir in facts)
    folder, pattern = (path, "**/*") if directory else (path.parent, glob.escape(path.name))
    holder = next(name for name, there, _ in facts if there)
    disks = find_disks(folder)
    arrives = disks.leads and not facts[disks.rank][1]
    if arrives:
        sys.stdout.write(f"{socket.gethostname()}: {path} is missing here and comes from {holder} ...\n")
        sys.stdout.flush()
    share_files(folder, disks, pattern, hashed=False)
    if arrives:
        files = [file for file in folder.glob(pattern) if file.is_file()]
        size = sum(file.stat().st_size for file in files) / 1e6
        sys.stdout.write(f"{socket.gethostname()}: {path}: {len(files)} files, {size:.1f} MB\n")
