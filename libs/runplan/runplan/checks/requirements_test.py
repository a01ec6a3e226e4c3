"""What is changed of a run's settings is asked of whoever obeys it; whole runs are in apps/common/tests."""

import pytest

from engines import EngineConfig
from engines.families.model_types import MODEL_TYPES
from engines.families.registry import FAMILIES
from runplan import PlainCluster, PlainRollout, RunSpec, make_plan, requirements

ENGINE = EngineConfig(device="cpu", vision="frozen")


def answers(engine: str) -> dict[str, bool]:
    rollout = PlainRollout(engine=engine, tp=2, memory_share=0.5)
    cluster = PlainCluster(rollout=rollout, changed=(("rollout.engine", engine), ("rollout.tp", 2)), apart="elsewhere")
    spec = RunSpec("grpo", "any", ENGINE, cluster, processes=2, steps=1, rows=2, longest=8)
    assert make_plan(spec).requirements == requirements(spec)
    return {each.feature: bool(each.answer) for each in requirements(spec) if each.feature[0] in "-i"}


def test_a_sampler_of_somebody_elses_answers_for_its_own_settings() -> None:
    assert answers("mine.py:Backend") == {
        "--rollout.engine mine.py:Backend": True,
        "--rollout.tensor-parallel 2": True,
        "images shown to the sampler": True,
    }
    assert answers("native")["--rollout.tensor-parallel 2"] is False


def test_vllm_answers_by_what_its_tests_have_run() -> None:
    pytest.importorskip("rollout.vllm")
    assert answers("vllm")["--rollout.tensor-parallel 2"] is True


def test_the_types_that_a_plan_knows_are_those_of_the_families() -> None:
    assert {family.name: family.model_types for family in FAMILIES} == MODEL_TYPES
