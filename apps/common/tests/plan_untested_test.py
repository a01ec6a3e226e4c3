"""Absent hardware and types without a family, in a plan: what is accepted by name, and what is left to a proof."""

from dataclasses import replace

import pytest
from transformers import SmolLM3Config

from apps.common.cli.untested import names_of_nothing, untested_parts
from apps.common.cluster import Cluster, Pools, RolloutLayout
from apps.common.data.model_files import config_fields
from engines import EngineConfig
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin
from runplan.report.plan import make_plan
from runplan.report.readiness import refuse_unready
from runplan.report.recipe_table import recipe_table
from runplan.run_spec import RunSpec
from schedules.config import ScheduleConfig

SHAPE = ModelShape(
    "mixture", "qwen3_moe", "here", layers=12, hidden=64, heads=8, kv_heads=2, head_dim=8, vocab=128, experts=16,
    experts_per_token=2, expert_intermediate=32,
)  # fmt: skip
ORIGIN = Origin("a script", SHAPE, "rows", 100)
PLAIN = RunSpec("grpo", "plain", EngineConfig(device="cpu"), Cluster(), 1, steps=10, rows=8, longest=64, group=4)


def test_absent_hardware_is_accepted_by_name_and_counts_as_untested() -> None:
    """What lacks more than hardware is not opened by a name."""
    several = replace(
        PLAIN, cluster=Cluster(pools=Pools(nodes=2), schedule=ScheduleConfig("one_step_off")), processes=2
    )
    npus = replace(PLAIN, engine=replace(PLAIN.engine, device="npu"))
    for spec, name in ((several, "nodes"), (npus, "npu")):
        plan = make_plan(spec)
        assert plan.to_allow == (name,)
        assert f"--allow-untested {name} starts it" in str(plan)
        assert recipe_table([(spec, PLAIN)]).splitlines()[-1] == "1 recipes, 0 can be run today, 1 untested, 1 shrunk"
        accepted = replace(spec, engine=replace(spec.engine, allow_untested=(name,)))
        refuse_unready(accepted)
        told = make_plan(accepted)
        assert {requirement.untested for requirement in told.untested} == {name}
        assert "UNTESTED  --" in str(told)
        assert "can be run, untested: 0 problems" in str(told)
        assert set(untested_parts(accepted, ())) == {name}
    more = replace(npus, cluster=Cluster(rollout=RolloutLayout(ray_workers=1)))
    assert make_plan(more).to_allow == ()
    with pytest.raises(ValueError, match="Ray's samplers are given CUDA devices or processors, no NPUs"):
        refuse_unready(replace(more, engine=replace(more.engine, allow_untested=("npu", "nodes"))))


def test_a_name_of_nothing_is_a_problem_of_the_plan() -> None:
    """The names of fields are those of the model that is named, else of the recipe's type; nested ones have dots."""

    def told(names: str, spec: RunSpec) -> list[str]:
        return names_of_nothing(replace(spec, engine=replace(spec.engine, allow_untested=tuple(names.split(",")))))

    large = replace(PLAIN, origin=ORIGIN)
    assert told("npu,nodes,sampler,norm_topk_prob,rope_parameters.rope_theta", large) == []
    (text,) = told("norm_topk_prop,npu", large)
    assert text.startswith(
        "--allow-untested norm_topk_prop: names are npu, nodes, sampler, deepep, teacher and fields of the model's"
    )
    named = replace(large, config_fields=config_fields(SmolLM3Config()))
    assert told("no_rope_layers", named) == []
    assert told("norm_topk_prob", named)
    assert told("norm_topk_prob", replace(PLAIN, needs_model=False))
    assert told("norm_topk_prob", replace(PLAIN, unknown="it is not here")) == []


def test_a_type_without_a_family_is_for_a_proof_to_admit() -> None:
    proven = replace(PLAIN, origin=replace(ORIGIN, shape=replace(SHAPE, model_type="smollm3")))
    refuse_unready(proven)
    with pytest.raises(ValueError, match="family smollm3 is not supported: no family of engines has it"):
        refuse_unready(replace(proven, engine=replace(proven.engine, prove="off")))
