"""Runs whose vLLM has two copies of the model: each one's weights are proven, and a run goes on without a dead one."""

import asyncio
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.common.cluster import RolloutLayout
from apps.grpo.main import run
from apps.grpo.testing.schedules import SHARED, proofs, rows, served
from rollout import Completion, VllmEngine
from schedules.config import Mode, ScheduleConfig
from schedules.weights import weight_checks
from schedules.weights.weight_checks import WeightsNotTakenError

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
COPIES = RolloutLayout("vllm", dp=2)


def assert_proven(run_dir: Path, lost: list[float]) -> None:
    logged = rows(run_dir)[1:]
    assert [row["weights/version"] for row in logged] == [1, 2, 3]
    assert [row["rollout/failed_episodes"] for row in logged] == [0, 0, 0]
    assert proofs(logged, "rollout/lost_replicas") == lost
    assert max(proofs(logged)) < 0.03


@pytest.mark.parametrize(("mode", "processes"), [("sync", 2), ("one_step_off", 1), ("fully_async", 1)])
def test_every_steps_weights_are_proven_to_be_in_both_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, processes: int
) -> None:
    asked, usual = set(), VllmEngine.generate

    def generate(self: VllmEngine, *arguments: Any, copy: int | None = None, **options: Any) -> Any:
        asked.add(copy)
        return usual(self, *arguments, copy=copy, **options)

    monkeypatch.setattr(VllmEngine, "generate", generate)
    run(served(tmp_path, COPIES, ScheduleConfig(mode), nproc_per_node=processes), SHARED)
    assert_proven(tmp_path, [0, 0] if mode == "fully_async" else [0, 0, 0])
    if (mode, processes) == ("one_step_off", 1):  # the others ask in processes of their own
        assert asked == {None, 0, 1}


def test_a_run_goes_on_without_a_copy_that_is_killed_while_it_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its second step; the episodes that it was at are played again."""
    usual = VllmEngine.generate
    found: list[int] = []

    def kill(sampler: VllmEngine) -> None:
        if sampler.version == 1 and not found:
            found.append(sampler.pids[1])
            os.kill(sampler.pids[1], signal.SIGKILL)

    async def generate(self: VllmEngine, *arguments: Any, copy: int | None = None, **options: Any) -> Any:
        if copy is None:
            asyncio.get_running_loop().call_soon(kill, self)
        return await usual(self, *arguments, copy=copy, **options)

    monkeypatch.setattr(VllmEngine, "generate", generate)
    run(served(tmp_path, COPIES, ScheduleConfig("sync")), SHARED)
    assert found
    assert_proven(tmp_path, [0, 1, 1])


def test_a_copy_that_keeps_older_weights_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers alone are those of other weights."""
    usual = weight_checks.check_completions

    async def check_completions(
        engine: Any, chat: Any, sampling: Any, prompts: Sequence[Sequence[int]], media: Sequence[Any] = ()
    ) -> list[Completion]:
        answers = await usual(engine, chat, sampling, prompts, media)
        assert len(answers) == 2 * len(prompts)
        stale = [replace(one, log_probs=tuple(p - 1 for p in one.log_probs)) for one in answers]
        return [*answers[: len(prompts)], *stale[len(prompts) :]]

    monkeypatch.setattr(weight_checks, "check_completions", check_completions)
    with pytest.raises(WeightsNotTakenError, match="log-probs of sampler 1 of 2"):
        run(served(tmp_path, COPIES, ScheduleConfig("sync")), SHARED)
