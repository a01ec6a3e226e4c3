"""A run that is killed, by a real SIGKILL of its process, before or after any rename or amid the warm start, can be
gone on with, and ends with the bits of a run that nobody stopped.
"""

import json
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

from apps.common.cli.command_line import main
from apps.common.run.config_file import CONFIG_NAME
from apps.common.testing.process_kills import (
    discard_output,
    import_modules,
    run_in_child,
    start_child,
    wait_for_content,
    wait_for_exit,
    watch_renames,
)
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE

When = Literal["before", "after"]
Whole = tuple[Path, list[str]]
"""The folder of a run that nothing ended, and its renames."""

DONE = (
    *("model", CONFIG_NAME, "warm-start/export"),
    *("checkpoints/step-000002", "checkpoints/step-000001.deleted", "export"),
)
"""Renames that end a part of a run. Those between them: kill_long_test."""
WARM = WarmStart(steps=2, batch_size=4, eval_every=1, eval_prompts=4, until_accuracy=1.0)


def small(run_dir: Path, **changes: Any) -> GrpoConfig:
    base = replace(RECIPE.config, steps=2, save_every=1, keep_checkpoints=0, eval_every=2, warm_start=WARM)
    return replace(base, run_dir=run_dir, data=replace(base.data, eval_prompts=4), **changes)


def go(run_dir: Path, kill_at: int | None = None, when: When = "before", log: Path | None = None) -> None:
    """The child: a run that kills itself at a rename, or writes its renames and modules into `log`."""
    discard_output()
    seen = watch_renames(run_dir, kill_at, when)
    resume = kill_at is None and (run_dir / CONFIG_NAME).is_file()
    run(small(run_dir, resume=resume), RECIPE)
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
    assert not list(run_dir.rglob("*.writing"))


def test_the_renames_are_those_that_matter(whole: Whole) -> None:
    _, renames = whole
    assert set(DONE) < set(renames)


def kill_at_each(numbers: Iterable[int], when: When, whole: Whole, folder: Path) -> None:
    """End a run at each of these renames; the run that goes on ends as the whole one."""
    for number in numbers:
        run_dir = folder / str(number)
        assert run_in_child(go, run_dir, kill_at=number, when=when) == -signal.SIGKILL, whole[1][number]
        assert run_in_child(go, run_dir) == 0, whole[1][number]
        assert_same_end(run_dir, whole[0])


def test_a_kill_before_a_rename_that_ends_a_part(whole: Whole, tmp_path: Path) -> None:
    kill_at_each([whole[1].index(name) for name in DONE], "before", whole, tmp_path)


def interrupted(run_dir: Path, said: Path, **changes: Any) -> None:
    """The child: a run under the command line's own handling of Ctrl-C, which comes as a signal."""
    discard_output(said)
    main(lambda: run(small(run_dir, steps=2000, **changes), RECIPE))


@pytest.mark.parametrize(
    ("rows", "report", "says"),
    [
        ("warm-start/metrics.jsonl", "warm-start/report.html", "goes on from the start"),
        ("metrics.jsonl", "report.html", "goes on from "),
    ],
)
def test_ctrl_c_leaves_a_report_and_promises_what_there_is(tmp_path: Path, rows: str, report: str, says: str) -> None:
    warm = replace(WARM, steps=200) if rows.startswith("warm") else replace(WARM, steps=0)
    child = start_child(interrupted, tmp_path / "run", tmp_path / "said", warm_start=warm)
    wait_for_content(tmp_path / "run" / rows)
    assert child.pid is not None
    os.kill(child.pid, signal.SIGINT)
    assert wait_for_exit(child) == 130
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert f"--resume --run-dir {tmp_path / 'run'} {says}" in said
    assert (tmp_path / "run" / report).is_file()
    assert not (tmp_path / "run" / "export").exists()


def test_a_kill_amid_the_warm_start(whole: Whole, tmp_path: Path) -> None:
    whole_dir, _ = whole
    child = start_child(go, tmp_path / "run")
    wait_for_content(tmp_path / "run" / "warm-start" / "metrics.jsonl")
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    assert wait_for_exit(child) == -signal.SIGKILL
    assert not (tmp_path / "run" / "export").exists()
    assert run_in_child(go, tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole_dir)
