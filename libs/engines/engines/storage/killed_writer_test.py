"""A writer that is killed (SIGKILL) before any one of its file operations leaves the old checkpoint or the new one.

The writers are forks of a small process that holds torch alone; each is killed at the next operation: renames,
exchanges, fsyncs, removals, files that are opened or created.
"""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from engines.storage import directories
from engines.storage.checkpoint import load_checkpoint, save_checkpoint
from engines.storage.writer import CheckpointWriter

OLD, NEW, LATER = 1.0, 2.0, 3.0
in_thread = False
"""In the small process: whether checkpoints are written in the background."""


def state(value: float) -> dict[str, Any]:
    return {"model": {"layers.0.weight": torch.full((4, 3), value)}}


def save(target: Path, value: float) -> None:
    if in_thread:
        writer = CheckpointWriter()
        writer.save(target, state(value), {"step": int(value)}, wait=False)
        writer.wait()
    else:
        save_checkpoint(target, state(value), {"step": int(value)})


def value_of(target: Path) -> Any:
    read = state(0.0)
    metadata = load_checkpoint(target, read)
    values = set(read["model"]["layers.0.weight"].flatten().tolist())
    assert values == {float(metadata["step"])}
    return metadata["step"]


def watch(folder: Path, operation: Callable[[str], None]) -> None:
    """Call operation(name) before each operation on a file under `folder`."""
    names = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "open", "shutil.rmtree", "os.link")
    inside: list[int] = []

    def ours(event: str, args: tuple[Any, ...]) -> bool:
        path = str(args[0])
        return event in names and (str(folder) in path or (event == "os.remove" and not os.path.isabs(path)))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if ours(event, args) and not inside:
            inside.append(1)
            operation(f"{event} {Path(args[0]).name}")
            inside.clear()

    def wrapped(module: ModuleType, name: str) -> None:
        original = getattr(module, name)

        def call(*args: Any) -> Any:
            operation(name)
            return original(*args)

        setattr(module, name, call)

    sys.addaudithook(hook)
    wrapped(os, "fsync")
    wrapped(directories, "_exchange")


def exit_code(work: Callable[[], None]) -> int | None:
    """Of a forked process that did `work`: 0, 1 after an error (which it prints), -N after signal N."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode


def killed_everywhere(root: Path, seed: Path) -> list[str]:
    """For each operation that a writer of NEW over a copy of `seed` makes: its name, after a kill before it."""
    log = root / "log.txt"

    def count() -> None:
        target = root / "count" / "last"
        shutil.copytree(seed, target.parent)
        with log.open("w") as out:
            watch(target.parent, lambda name: print(name, file=out, flush=True))
            save(target, NEW)

    assert exit_code(count) == 0
    names = log.read_text().splitlines()
    for number in range(len(names)):

        def write(number: int = number) -> None:
            target = root / str(number) / "last"
            shutil.copytree(seed, target.parent)
            left = [number]

            def operation(name: str) -> None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1

            watch(target.parent, operation)
            save(target, NEW)

        assert exit_code(write) == -signal.SIGKILL, names[number]
    return names


def main(folder: str, exchange: str) -> None:
    global in_thread
    root = Path(folder)
    in_thread = exchange == "in a thread"
    if exchange == "without":
        directories._exchange = lambda one, other: False
    save(root / "seed" / "last", OLD)
    names = {"seed": killed_everywhere(root / "first", root / "seed")}
    if exchange == "without":
        # Between the two renames only the directory put aside is there: writers that begin from that.
        (root / "aside").mkdir()
        shutil.copytree(root / "seed" / "last", root / "aside" / "last.old")
        shutil.copytree(root / "seed" / "last", root / "aside" / "last.writing")
        names["aside"] = killed_everywhere(root / "second", root / "aside")
    (root / "names.json").write_text(json.dumps(names))


@pytest.mark.parametrize("exchange", ["with", "without", "in a thread"])
def test_the_old_or_the_new_one(tmp_path: Path, exchange: str) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path), exchange]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = json.loads((tmp_path / "names.json").read_text())
    values = set()
    for start, folder in (("seed", "first"), ("aside", "second")):
        for number, name in enumerate(names.get(start, [])):
            target = tmp_path / folder / str(number) / "last"
            if exchange != "without":
                assert target.is_dir(), name
            value = value_of(target)
            assert value in (OLD, NEW), name
            values.add(value)
            save(target, LATER)
            assert value_of(target) == LATER, name
            assert [path.name for path in target.parent.iterdir()] == ["last"], name
    assert values == {OLD, NEW}
    seen = {name.split()[0] for operations in names.values() for name in operations}
    assert {"fsync", "os.rename", "os.remove", "os.rmdir", "open"} <= seen
    # The manifest is what is written last.
    order = names["seed"]
    before = set(order[: order.index("open engine.json")])
    assert {"open __0_0.distcp", "open .metadata", "open random_0.pt"} <= before


def test_directories_change_places(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert directories._exchange(tmp_path / "a", tmp_path / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["a"]
    with pytest.raises(FileNotFoundError):
        directories._exchange(tmp_path / "a", tmp_path / "absent")


def test_an_unfinished_directory_leaves_no_file_in_the_next(tmp_path: Path) -> None:
    target = tmp_path / "export"
    (directories.fresh_temporary(target) / "shard-of-another-model").touch()
    assert list(directories.fresh_temporary(target).iterdir()) == []


if __name__ == "__main__":
    main(*sys.argv[1:])
