"""What samples starts while training is built, in processes of its own; either failure ends both."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import apps.grpo.build as parts
from apps.common.cluster import RolloutLayout
from apps.common.data.tokenizer import load_tokenizer
from apps.grpo.build import RunBuilder, RunComponents
from apps.grpo.sampling.native import NativeBackend
from apps.grpo.sampling.vllm import VllmBackend
from apps.grpo.testing.recipe import AsciiTasks
from apps.grpo.testing.schedules import ASYNC, SYNC, small
from apps.grpo.testing.slow_vllm import BUILT, PID, READY, wait_for_file, write_script
from apps.quickstart.model import ensure_tiny_model, served_config
from engines import TrainEngine, build_engine
from rollout import NativeEngine, VllmEngine
from schedules.config import ScheduleConfig
from schedules.runtime.interrupts import Runner

VLLM = RolloutLayout("vllm")


@dataclass(frozen=True)
class Made:
    """A run that can be built, and the folder of what stands for vLLM."""

    start: RunBuilder
    folder: Path

    def components(self, stack: ExitStack) -> RunComponents:
        return self.start.components(stack)

    @property
    def vllm_lives(self) -> bool:
        return Path("/proc", (self.folder / PID).read_text()).exists()


class WaitingBackend(NativeBackend):
    """Sampler of a process that is there only once training is built."""

    def build(self, config: Any, model: Path, version: int) -> NativeEngine:
        wait_for_file(model.parent / BUILT, "training was not built while the sampler started")
        return super().build(config, model, version)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's directory; beside it lies the file BUILT once training is built."""

    def built(*arguments: Any) -> TrainEngine:
        engine = build_engine(*arguments)
        (tmp_path / BUILT).touch()
        return engine

    monkeypatch.setattr(parts, "build_engine", built)
    return ensure_tiny_model(tmp_path / "model", 0, served_config)


def made(model: Path, schedule: ScheduleConfig, layout: RolloutLayout, runner: Runner) -> Made:
    config = small(model.parent / "run", schedule)
    config = replace(config, cluster=replace(config.cluster, rollout=layout))
    start = RunBuilder(config, AsciiTasks(4), load_tokenizer(model), model, model.parent / "run", 0, None, None, runner)
    return Made(start, model.parent)


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    """Engines make a process group of one: no test after these finds it."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def runner() -> Iterator[Runner]:
    with Runner() as runner:
        yield runner


def test_vllm_starts_while_training_is_built(model: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ready only once training is built: one after the other, neither would end."""
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", str(write_script(model.parent, waits=True)))
    run = made(model, SYNC, VLLM, runner)
    with ExitStack() as stack:
        found = run.components(stack)
        assert isinstance(found.sampler, VllmEngine)
        assert found.sampler.alive
        assert found.sampler.dtype == "float32"
        assert run.vllm_lives
    assert not run.vllm_lives


def test_on_one_device_training_takes_memory_once_vllm_has_measured_it(
    model: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", str(write_script(model.parent, waits=False)))
    monkeypatch.setattr(VllmBackend, "shares_device", lambda *arguments: True)
    seen: list[bool] = []

    def noted(*arguments: Any) -> TrainEngine:
        seen.append((model.parent / READY).exists())
        assert arguments[1] is not None  # the model was opened meanwhile
        return build_engine(*arguments)

    monkeypatch.setattr(parts, "build_engine", noted)
    with ExitStack() as stack:
        made(model, SYNC, VLLM, runner).components(stack)
    assert seen == [True]


def test_a_vllm_that_fails_is_named_and_leaves_no_process(
    model: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", str(write_script(model.parent, waits=True, fails=True)))
    run = made(model, SYNC, VLLM, runner)
    words = r"ended with code 1; its last words:\nno kernel for this model"
    with pytest.raises(RuntimeError, match=words) as failed, ExitStack() as stack:
        run.components(stack)
    assert failed.value.__notes__ == ["the sampler could not start"]
    assert not run.vllm_lives


def test_a_training_that_fails_is_named_and_ends_vllm(
    model: Path, runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", str(write_script(model.parent, waits=True)))

    def fails(*arguments: Any) -> TrainEngine:
        wait_for_file(model.parent / PID, "vLLM did not begin")
        raise ValueError("no room")

    monkeypatch.setattr(parts, "build_engine", fails)
    run = made(model, SYNC, VLLM, runner)
    with pytest.raises(ValueError, match=r"^no room\n") as failed, ExitStack() as stack:
        run.components(stack)
    assert failed.value.__notes__ == ["training could not be built; the sampler, which was starting, is ended"]
    assert not run.vllm_lives


def test_a_sampling_process_starts_while_training_is_built(model: Path, runner: Runner) -> None:
    """Of a new run; the process samples by the first weights, from the tasks' first place."""
    layout = RolloutLayout(f"{WaitingBackend.__module__}:{WaitingBackend.__name__}")
    run = made(model, ASYNC, layout, runner)
    with ExitStack() as stack:
        found = run.components(stack)
        assert (found.sampler, found.session) == (None, None)
        assert found.begin is not None
        worker: Any = found.begin(0, {"step": 0, "cursor": run.start.tasks.cursor()}, lambda futures: None)
        assert worker.alive
        pid = worker.process.pid
        worker.close()
    assert not Path(f"/proc/{pid}").exists()
    assert os.getpid() != pid
