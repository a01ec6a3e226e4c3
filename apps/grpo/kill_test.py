"""A run that is killed, by a real SIGKILL of its process, before or after any rename or amid the warm start, can be
gone on with, and ends with the bits of a run that nobody stopped.

Runs are forked children: they share what was imported and nothing else.
"""

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.common.cli import main
from apps.common.config_file import CONFIG_NAME
from apps.grpo.config import WarmStart
from apps.grpo.main import run
from apps.grpo.testing import RECIPE

FORK = multiprocessing.get_context("fork")
WARM = WarmStart(steps=2, batch_size=4, eval_every=1, eval_prompts=4, until_accuracy=1.0)


def small(run_dir, **changes):
    base = replace(RECIPE.config, steps=2, save_every=1, keep_checkpoints=0, eval_every=2, warm_start=WARM)
    return replace(base, run_dir=run_dir, data=replace(base.data, eval_prompts=4), **changes)


def go(run_dir, kill_at=None, when="before", log=None, **changes):
    """The child: a run that kills itself at a rename, or counts its renames into `log`."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    seen = []

    def watched(real):
        def rename(source, target, *args, **kwargs):
            if str(target).startswith(str(run_dir)):
                seen.append(os.path.relpath(target, run_dir))
                if len(seen) - 1 == kill_at and when == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
            result = real(source, target, *args, **kwargs)
            if str(target).startswith(str(run_dir)) and len(seen) - 1 == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return rename

    os.rename, os.replace = watched(os.rename), watched(os.replace)
    resume = kill_at is None and (run_dir / CONFIG_NAME).is_file()
    run(small(run_dir, resume=resume, **changes), RECIPE)
    if log is not None:
        log.write_text(json.dumps(seen))


def in_child(*args, **kwargs):
    """Its exit code: 0, or minus the signal that ended it."""
    child = FORK.Process(target=go, args=args, kwargs=kwargs)
    child.start()
    return end_of(child)


def end_of(child, seconds=400):
    """Its exit code once it has ended; one that hangs is killed, and the error says so."""
    child.join(seconds)
    if child.is_alive():
        child.kill()
        raise AssertionError(f"the run still stood after {seconds} s")
    return child.exitcode


def weights(run_dir):
    return dict(AutoModelForCausalLM.from_pretrained(run_dir / "export").named_parameters())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert in_child(folder / "run", log=folder / "renames.json") == 0
    return folder / "run", json.loads((folder / "renames.json").read_text())


def assert_same_end(run_dir, whole_dir):
    expected, found = weights(whole_dir), weights(run_dir)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert not list(run_dir.rglob("*.writing"))


def test_the_renames_are_those_that_matter(whole):
    _, renames = whole
    assert {"model", CONFIG_NAME, "export"} <= set(renames)
    assert any(name.startswith("checkpoints/step-000001") for name in renames)
    assert any(name.startswith("warm-start/") for name in renames)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_at_any_rename(whole, tmp_path, when):
    whole_dir, renames = whole
    for number, name in enumerate(renames):
        run_dir = tmp_path / f"{number}-{when}"
        assert in_child(run_dir, kill_at=number, when=when) == -signal.SIGKILL, name
        assert in_child(run_dir) == 0, name
        assert_same_end(run_dir, whole_dir)


def interrupted(run_dir, said, **changes):
    """The child: a run under the command line's own handling of Ctrl-C, which comes as a signal."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the life of the process)
    sys.stderr = said.open("w")
    main(lambda: run(small(run_dir, steps=2000, **changes), RECIPE))


def wait_for_row(path):
    deadline = time.monotonic() + 200
    while not (path.is_file() and path.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert path.is_file()


@pytest.mark.parametrize(
    ("rows", "report", "says"),
    [
        ("warm-start/metrics.jsonl", "warm-start/report.html", "goes on from the start"),
        ("metrics.jsonl", "report.html", "goes on from "),
    ],
)
def test_ctrl_c_leaves_a_report_and_promises_what_there_is(tmp_path, rows, report, says):
    warm = replace(WARM, steps=200) if rows.startswith("warm") else replace(WARM, steps=0)
    child = FORK.Process(target=interrupted, args=(tmp_path / "run", tmp_path / "said"), kwargs={"warm_start": warm})
    child.start()
    wait_for_row(tmp_path / "run" / rows)
    os.kill(child.pid, signal.SIGINT)
    assert end_of(child) == 130
    said = (tmp_path / "said").read_text().splitlines()[-1]
    assert f"--resume --run-dir {tmp_path / 'run'} {says}" in said
    assert (tmp_path / "run" / report).is_file()
    assert not (tmp_path / "run" / "export").exists()


def test_a_kill_amid_the_warm_start(whole, tmp_path):
    whole_dir, _ = whole
    child = FORK.Process(target=go, args=(tmp_path / "run",))
    child.start()
    rows = tmp_path / "run" / "warm-start" / "metrics.jsonl"
    wait_for_row(rows)
    os.kill(child.pid, signal.SIGKILL)
    assert end_of(child) == -signal.SIGKILL
    assert not (tmp_path / "run" / "export").exists()
    assert in_child(tmp_path / "run") == 0
    assert_same_end(tmp_path / "run", whole_dir)
