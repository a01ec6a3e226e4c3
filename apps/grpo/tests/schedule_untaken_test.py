"""Fully asynchronous runs whose sampler did not take the weights it was handed, at a sync or outside one.

Each in a forked child: a build of torch for CUDA forks no process that has computed a gradient.
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

from apps.common.testing.process_kills import run_in_child
from apps.grpo.testing.schedules import ASYNC, assert_nothing_lost, go, rows, small
from rollout.control.staleness import Train
from rollout.sync.pieces import Bucket
from rollout.workers.process import WorkerProcess
from schedules.fully_async.fully_async import FullyAsyncSchedule
from schedules.schedule import TrainStepResult

NOT_TAKEN = "it does not sample from the trainer's weights"


def fail_commits(*which: int) -> None:
    """The calls numbered `which` to commit fail once the sampling process has committed, and it lives on."""
    warnings.showwarning = lambda message, *_: print(message, file=sys.stderr)  # pytest's own keeps them to itself
    real, calls = WorkerProcess.commit, 0

    async def commit(self: WorkerProcess, version: int) -> None:
        nonlocal calls
        calls += 1
        await real(self, version)
        if calls in which:
            raise RuntimeError("vLLM did not take all weights: lm_head.weight")

    WorkerProcess.commit = commit  # type: ignore[method-assign]


def scale(worker: int) -> None:
    """The sampling process number `worker`, from 0, gets its first weights half as large again."""
    real, handed = WorkerProcess.receive, list[int]()
    committed, workers = WorkerProcess.commit, list[WorkerProcess]()

    async def receive(self: WorkerProcess, bucket: Bucket) -> int:
        if self not in workers:
            workers.append(self)
        if workers.index(self) != worker or handed:
            return await real(self, bucket)
        other = Bucket(bucket.headers, bucket.buffer.clone())
        for header in other.headers:
            end = header.start + header.numel * header.dtype.itemsize
            other.buffer[header.start : end].view(header.dtype).mul_(1.5)
        return await real(self, other)

    async def commit(self: WorkerProcess, version: int) -> None:
        await committed(self, version)
        if workers.index(self) == worker:
            handed.append(version)

    WorkerProcess.receive, WorkerProcess.commit = receive, commit  # type: ignore[method-assign]


def test_a_sampler_that_lives_and_did_not_take_weights_is_replaced(tmp_path: Path) -> None:
    """Its weights are those of the new number already: the same number again would be refused."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=lambda: fail_commits(2)) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))
    assert [row["weights/version"] for row in rows(run_dir)[1:]] == [1, 2, 3, 4]
    assert "is replaced: weights 2 are not taken" in (tmp_path / "run.err").read_text()


def test_samplers_that_never_take_weights_end_the_run_with_the_first_reason(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=lambda: fail_commits(*range(2, 30))) == 1
    said = (tmp_path / "run.err").read_text().splitlines()[-1]
    assert "did not take all weights: lm_head.weight" in said
    assert "not newer" not in said


def replace_amid_a_window() -> None:
    """The sampling process is killed when the third step is trained, and found dead before the fourth."""
    real = FullyAsyncSchedule._train

    def train(self: FullyAsyncSchedule, decision: Train, begun: float) -> TrainStepResult:
        found = real(self, decision, begun)
        if decision.step == 3:
            worker = self._process.worker
            assert isinstance(worker, WorkerProcess)
            worker.process.kill()
            worker.process.join()
            worker._reader.join()
            assert self._living() is not worker
        return found

    FullyAsyncSchedule._train = train  # type: ignore[method-assign]


def test_a_replacement_with_other_weights_stops_the_run(tmp_path: Path) -> None:
    """Though the next hand-over would reach it whole: what it samples until then is not the trainer's."""

    def prepare() -> None:
        scale(1)
        replace_amid_a_window()

    schedule = replace(ASYNC, parameter_sync_step=2)
    assert run_in_child(go, tmp_path / "run", schedule, prepare=prepare, save_every=2, eval_every=4) == 1
    assert NOT_TAKEN in (tmp_path / "run.err").read_text()


def test_a_resume_with_other_weights_stops_the_run(tmp_path: Path) -> None:
    """Before its first step is trained: nothing is known then but what it has sampled."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, steps=2, save_every=2, eval_every=2) == 0
    assert run_in_child(go, run_dir, ASYNC, save_every=2, eval_every=2, prepare=lambda: scale(0)) == 1
    assert NOT_TAKEN in (tmp_path / "run.err").read_text()
    assert [row["step"] for row in rows(run_dir)] == [0, 1, 2]
