"""A supervised run that is killed, by a real SIGKILL of its process, at a named point or before or after any rename,
can be gone on with, and ends with the bits of a run that nobody stopped.
"""

import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from apps.common.cli.command_line import main
from apps.common.run import checkpoint_saver as saves_module
from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.config_file import CONFIG_NAME
from apps.common.run.reporter import Reporter
from apps.common.testing.process_kills import (
    discard_output,
    hang_at_call,
    import_modules,
    kill_at_call,
    run_in_child,
    start_child,
    wait_for_content,
    wait_for_exit,
    watch_renames,
)
from apps.common.testing.weight_delta import assert_trained
from apps.sft import train as train_module
from apps.sft.config import SftConfig
from apps.sft.main import run
from apps.sft.recipes import quickstart
from engines.storage import checkpoint as checkpoint_module

When = Literal["before", "after"]
Whole = tuple[Path, list[str]]
"""The folder of a run that nothing ended, and its renames."""

POINTS: dict[str, tuple[Any, str, int, When]] = {
    "before the engine is built": (train_module, "build_engine", 1, "before"),
    "before the first row": (Reporter, "step", 1, "before"),
    "after the first row": (Reporter, "step", 1, "after"),
    "before the row of a step": (Reporter, "step", 2, "before"),
    "between a row and its checkpoint": (Reporter, "step", 2, "after"),
    "amid the old checkpoint's deletion": (saves_module, "delete_old_checkpoints", 2, "before"),
    "amid the writing of a checkpoint": (checkpoint_module, "write_manifest", 1, "before"),
    "amid the writing of the last checkpoint": (checkpoint_module, "replace_directory", 2, "before"),
    "between the last checkpoint and the export": (train_module, "save_export", 1, "before"),
    "between the export and the report": (train_module, "save_export", 1, "after"),
    "amid the writing of demonstrations": (os, "replace", 2, "before"),
}


def small(run_dir: Path, **changes: Any) -> SftConfig:
    base = quickstart.RECIPE.config
    settings = {"steps": 2, "batch_size": 4, "eval_every": 1, "eval_rows": 4, "save_every": 1}
    data = replace(base.data, demonstrations=64)
    return replace(base, run_dir=run_dir, data=data, keep_checkpoints=0, **(settings | changes))


def go(
    run_dir: Path, kill_at: int | None = None, when: When = "before", point: str | None = None, log: Path | None = None
) -> None:
    """The child: a run that kills itself at a rename or a named point, or writes its renames and modules into `log`."""
    discard_output()
    seen = watch_renames(run_dir, kill_at, when)
    if point is not None:
        kill_at_call(*POINTS[point])
    resume = kill_at is None and point is None and (run_dir / CONFIG_NAME).is_file()
    run(small(run_dir, resume=resume))
    if log is not None:
        log.write_text(json.dumps([seen, [*sys.modules]]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    assert run_in_child(go, folder / "run", log=folder / "renames.json") == 0
    assert_trained(folder / "run")
    renames, modules = json.loads((folder / "renames.json").read_text())
    import_modules(modules)
    return folder / "run", renames


def assert_same_end(run_dir: Path, whole_dir: Path) -> None:
    expected, actual = (load_file(folder / "export/model.safetensors") for folder in (whole_dir, run_dir))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert (run_dir / "report.html").is_file()
    assert not list(run_dir.rglob("*.writing"))


def test_the_renames_are_those_that_matter(whole: Whole) -> None:
    _, renames = whole
    assert {"model", "demonstrations.jsonl", CONFIG_NAME, "export"} <= set(renames)
    assert any(name.startswith("checkpoints/step-000001") for name in renames)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_rename(whole: Whole, tmp_path: Path, when: When) -> None:
    """After a rename is just before the next one, but for what is being written: once for files of a kind."""
    whole_dir, renames = whole
    last_of_kind = {re.sub(r"\d", "", name): number for number, name in enumerate(renames)}
    for number, name in enumerate(renames):
        if when == "after" and number not in last_of_kind.values():
            continue
        run_dir = tmp_path / f"{number}-{when}"
        assert run_in_child(go, run_dir, kill_at=number, when=when) == -signal.SIGKILL, name
        assert run_in_child(go, run_dir) == 0, name
        assert_same_end(run_dir, whole_dir)


@pytest.mark.parametrize("point", POINTS)
def test_a_kill_at_a_named_point(whole: Whole, tmp_path: Path, point: str) -> None:
    whole_dir, _ = whole
    assert run_in_child(go, tmp_path / "run", point=point) == -signal.SIGKILL
    assert run_in_child(go, tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole_dir)


def overtaken(run_dir: Path) -> None:
    """The child: its first checkpoint never gets its manifest, and it is killed when the next step is logged."""
    discard_output()
    hang_at_call(checkpoint_module, "write_manifest")
    kill_at_call(Reporter, "step", 3, "after")
    run(small(run_dir))


def test_training_goes_on_while_a_checkpoint_is_written_which_counts_only_when_it_is_whole(
    whole: Whole, tmp_path: Path
) -> None:
    whole_dir, _ = whole
    assert run_in_child(overtaken, tmp_path / "run") == -signal.SIGKILL
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert last_checkpoint(tmp_path / "run") is None
    assert run_in_child(go, tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole_dir)


def interrupted(run_dir: Path, said: Path) -> None:
    """The child: a run under the command line's own handling of Ctrl-C, which comes as a signal."""
    discard_output(said)
    main(lambda: run(small(run_dir, steps=2000)))


def test_ctrl_c_leaves_a_report_and_says_how_to_go_on(tmp_path: Path) -> None:
    child = start_child(interrupted, tmp_path / "run", tmp_path / "said")
    wait_for_content(tmp_path / "run" / "metrics.jsonl")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    assert wait_for_exit(child) == 130
    assert f"--resume --run-dir {tmp_path / 'run'} goes on" in (tmp_path / "said").read_text().splitlines()[-1]
    assert (tmp_path / "run" / "report.html").is_file()
    assert not (tmp_path / "run" / "export").exists()
