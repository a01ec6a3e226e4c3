"""Two machines, as namespaces of this one: runs of both apps without a shared disk, resumed in another order."""

import hashlib
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from apps.common.testing.machines import Machine, machines, missing, start_torchrun
from apps.quickstart.model import ensure_tiny_model

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
SFT = ["-m", "apps.sft.main", "--demonstrations", "200", "--save-every", "2", "--batch-size", "8"]
SECONDS = 600


def start(
    order: Sequence[Machine], ranks: int, port: int, folder: Path, program: Sequence[str], run_dir: str = "run"
) -> list["subprocess.Popen[bytes]"]:
    """Start a run of an app; see `start_torchrun`."""
    several = ["--pools.nodes", str(len(order)), "--allow-untested", "nodes"] if len(order) > 1 else []
    return start_torchrun(order, ranks, port, folder, [*program, *several, "--run-dir", run_dir])


def finish(processes: list["subprocess.Popen[bytes]"], folder: Path) -> None:
    codes = [process.wait(SECONDS) for process in processes]
    assert not any(codes), [path.read_text()[-3000:] for path in folder.glob("log*")]


def digest(machine: Machine, path: str, folder: Path) -> str:
    """Return the SHA-256 of a file on a machine's disk."""
    out = folder / f"copy{machine.number}"
    machine.start(["cp", path, str(out)], folder / "copies").wait(SECONDS)
    return hashlib.sha256(out.read_bytes()).hexdigest()


def test_machines_without_a_shared_disk_train_what_one_machine_trains(tmp_path: Path) -> None:
    """The second start has them in the other order: the first rank then has what was on the other's disk."""
    weights = "run/export/model.safetensors"
    with machines(1, tmp_path / "one") as (alone,):
        finish(start([alone], 2, 29511, tmp_path / "one", [*SFT, "--max-steps", "6"]), tmp_path / "one")
        straight = digest(alone, weights, tmp_path / "one")
    two = tmp_path / "two"
    with machines(2, two, rate="400mbit") as both:
        finish(start(both, 1, 29512, two, [*SFT, "--max-steps", "4"]), two)
        other = both[::-1]
        finish(start(other, 1, 29513, two, [*SFT, "--max-steps", "6", "--resume"]), two)
        assert "2 steps after the 4 of the checkpoint" in (two / "log1").read_text()
        assert digest(other[0], weights, two) == straight
        log = digest(other[0], "run/metrics.jsonl", two)
        assert log != digest(other[1], "run/metrics.jsonl", two), "the first rank's machine goes on with the log"


def test_a_killed_machine_ends_the_run_which_goes_on_from_a_shared_disk(tmp_path: Path) -> None:
    """All its processes go at once; the other says so within the collectives' time, and new machines resume."""
    shared = tmp_path / "shared"
    shared.mkdir()
    program = [*SFT, "--trainer.collective-timeout-seconds", "30"]
    run_dir = str(shared / "run")
    with machines(2, tmp_path / "first", shared) as (one, other):
        running = start([one, other], 1, 29514, tmp_path / "first", [*program, "--max-steps", "2000"], run_dir)
        end = time.monotonic() + SECONDS
        while not (shared / "run/checkpoints/step-000002").exists():
            assert time.monotonic() < end, (tmp_path / "first/log0").read_text()[-3000:]
            assert running[0].poll() is None, (tmp_path / "first/log0").read_text()[-3000:]
            time.sleep(0.2)
        other.kill()
        assert running[0].wait(SECONDS) != 0
        assert f"--resume --run-dir {run_dir}" in (tmp_path / "first/log0").read_text()
    steps = max(int(path.name.removeprefix("step-")) for path in (shared / "run/checkpoints").glob("step-??????"))
    with machines(2, tmp_path / "second", shared) as both:
        folder = tmp_path / "second"
        finish(start(both, 1, 29515, folder, [*program, "--max-steps", str(steps + 1), "--resume"], run_dir), folder)
        assert f"1 steps after the {steps} of the checkpoint" in (folder / "log0").read_text()


def test_reinforcement_learning_needs_no_shared_disk(tmp_path: Path) -> None:
    """The model and the warm start's export are made by the first rank, and reach the other machine."""
    program = ["-m", "apps.grpo.main", "--warm-start.steps", "2", "--warm-start.eval-every", "2", "--max-steps", "2"]
    with machines(2, tmp_path) as both:
        finish(start(both, 1, 29516, tmp_path, program), tmp_path)
        assert digest(both[0], "run/warm-start/export/model.safetensors", tmp_path) == digest(
            both[1], "run/warm-start/export/model.safetensors", tmp_path
        )


def test_inputs_that_one_machine_has_reach_all_others(tmp_path: Path) -> None:
    """Of four machines one has the model, another the data and the user's code, at relative paths."""
    made = tmp_path / "made"
    ensure_tiny_model(made / "model", 0)
    rows = [{"question": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(40)]
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (made / "own.py").write_text("def reward(reply, reference):\n    return len(reply.text) % 3 / 2\n")
    program = ["-m", "apps.grpo.main", "--model", "in/model", "--data", "in/rows.jsonl", "--reward", "in/own.py:reward"]
    program += ["--max-steps", "1", "--prompts-per-step", "4", "--group-size", "4", "--eval-prompts", "4"]
    program += ["--sampling.max-new-tokens", "8", "--max-episode-tokens", "2048"]
    with machines(4, tmp_path) as all_of_them:
        for machine, names in zip(all_of_them, ((), ("rows.jsonl", "own.py"), ("model",), ()), strict=True):
            machine.start(["mkdir", "in"], tmp_path / "copies").wait(SECONDS)
            for name in names:
                machine.start(["cp", "-r", str(made / name), "in/"], tmp_path / "copies").wait(SECONDS)
        finish(start(all_of_them, 1, 29517, tmp_path, program), tmp_path)
        for name in ("in/model/model.safetensors", "in/rows.jsonl", "in/own.py"):
            assert len({digest(machine, name, tmp_path) for machine in all_of_them}) == 1
    assert "machine0: in/model is missing here and comes from machine2" in (tmp_path / "log0").read_text()
    assert "machine3: in/own.py: 1 files" in (tmp_path / "log3").read_text()
