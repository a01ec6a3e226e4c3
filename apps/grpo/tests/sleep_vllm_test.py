"""`--rollout.sleep`: training and vLLM take turns with a device, in steps, proofs and evaluations.

vLLM refuses to sleep on a CPU, where it keeps its memory: all but that is as on a device that has some
(`rollout/vllm/sleep_gpu_test.py` has the memory).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import apps.grpo.build as parts
import apps.grpo.run as command
import apps.grpo.step as step
from apps.common.cluster import RolloutLayout
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.sampling.vllm import VllmBackend, rollout_config
from apps.grpo.testing.schedules import rows, served
from engines import TrainEngine, build_engine
from engines.step import Engine
from objectives.advantages import per_token
from rollout import VllmEngine
from schedules.config import ScheduleConfig
from schedules.sampling.session import RolloutSession

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


class Drowsy(VllmEngine):
    """Sleeps on a CPU: requests wait, weights are read again at `wake`, the memory stays."""

    async def sleep(self) -> None:
        await self._sleep()


def at_random(batch: TensorDict, config: GrpoConfig, number: int) -> torch.Tensor:
    """A random model is right about nothing: advantages that move every weight, so far that stale ones are found."""
    generator = torch.Generator().manual_seed(number)
    scores = torch.randn(len(batch["input_ids"].unbind()), generator=generator)
    return per_token(scores, batch["loss_mask"])


@pytest.mark.parametrize("offload", [True, False])
def test_either_has_the_device_alone_and_each_steps_weights_arrive_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offload: bool
) -> None:
    made: list[Any] = []
    seen: list[tuple[str, bool, bool]] = []

    def built(*args: Any, **options: Any) -> TrainEngine:
        assert made[0]._asleep  # it sleeps before there is a trainer
        engine = build_engine(*args, **options)
        made.append(engine)
        return engine

    def started(self: VllmBackend, config: GrpoConfig, model: Path, version: int) -> VllmEngine:
        layout = replace(config.cluster.rollout, sleep=False)
        awake = replace(config, cluster=replace(config.cluster, rollout=layout))
        sampler = Drowsy(model, rollout_config(awake), version, wait=False)
        made.append(sampler)
        return sampler

    def watched(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def noted(self: Any, *args: Any, **options: Any) -> Any:
            seen.append((name, made[0]._asleep, made[1]._offloaded))
            return real(self, *args, **options)

        monkeypatch.setattr(owner, name, noted)

    monkeypatch.setattr(command, "check_machine", lambda config: None)  # it refuses this setting on a CPU
    monkeypatch.setattr(parts, "build_engine", built)
    monkeypatch.setattr(VllmBackend, "begin", started)
    watched(VllmEngine, "generate")
    watched(RolloutSession, "sync")
    watched(Engine, "train_batch")
    watched(Engine, "forward")
    monkeypatch.setattr(step, "advantages_of", at_random)
    config = served(tmp_path, RolloutLayout("vllm", sleep=True), ScheduleConfig())
    config = replace(config, engine=replace(config.engine, lr=0.02))
    run(replace(config, cluster=replace(config.cluster, offload=offload)))
    assert {(asleep, moved) for name, asleep, moved in seen if name == "generate"} == {(False, offload)}
    assert {(asleep, moved) for name, asleep, moved in seen if name != "generate"} == {(True, False)}
    assert {name for name, *_ in seen} == {"generate", "train_batch", "forward", "sync"}
    logged = rows(tmp_path)[1:]
    assert [row["weights/version"] for row in logged] == [1, 2, 3]
    checked = [row for row in logged if "weights/check/abs" in row]
    assert [row["step"] for row in checked] == [2, 3]  # of the weights that sampled the step, after the first ones
    assert max(row["weights/check/abs"] for row in checked) < 0.03
    assert all(row["weights/pause_ms"] > 0 for row in checked)
    assert_trained(tmp_path)
