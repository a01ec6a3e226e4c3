"""A file system without space, a real one: one line that names the directory and how to go on, and then going on."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from apps.common.cli import command_line as cli
from apps.common.testing.small_disk import assert_one_line, has_namespaces, resized, run_on_small_disk
from apps.sft import run as run_module
from apps.sft.main import main

SFT = "--save-every 1 --eval-rows 4 --batch-size 4 --demonstrations 64 --max-steps 3"
pytestmark = pytest.mark.skipif(not has_namespaces(), reason="no namespace of its own for mounts")


def program(folder: Path, flags: str) -> Callable[[], None]:
    """The app, as the shell starts it; what it imports late is imported before the children are forked."""
    assert run_module
    cache = "" if "--cache-dir" in flags else f"--cache-dir {folder}/tokens"
    words = f"{flags} {cache} --run-dir DISK/run".replace("DISK", f"{folder}/disk").split()
    return lambda: cli.main(lambda: main(words))


@pytest.mark.parametrize(
    ("flags", "size", "what", "then"),
    [
        (SFT, "100k", "the tiny model or the demonstrations", "start again"),
        (f"{SFT} --demonstrations 5000 --cache-dir DISK", "1700k", "the tokens of", "start again"),
        (
            f"{SFT} --eval-every 9 --max-steps 5",
            "4m",
            "the checkpoint of step 2",
            "--resume --run-dir DISK/run goes on from step 1",
        ),
        (
            f"{SFT} --eval-every 9 --max-steps 5 --nproc-per-node 2",
            "4m",
            "the checkpoint of step 2",
            "--resume --run-dir DISK/run goes on from",
        ),
    ],
)
def test_a_full_disk_is_one_line(tmp_path: Path, flags: str, size: str, what: str, then: str) -> None:
    assert_one_line(run_on_small_disk(tmp_path, size, program(tmp_path, flags)), tmp_path, what, then)


def test_with_room_again_the_run_goes_on(tmp_path: Path) -> None:
    """After a disk that was full for the export; the report of what was logged is written then."""
    files = lambda: print(*os.listdir(tmp_path / "disk/run"), *os.listdir(tmp_path / "disk/run/export"))  # noqa: E731
    done = run_on_small_disk(
        tmp_path, "9200k", program(tmp_path, SFT), resized(tmp_path, "40m"), program(tmp_path, f"{SFT} --resume"), files
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == 1
    assert {"report.html", "model.safetensors"} <= set(done.stdout.split())
