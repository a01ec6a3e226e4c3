"""Every setting of the cluster is obeyed where something can obey it, and the plan knows it; the rest is refused.

What is obeyed is given beside the settings that it acts on: the run is then not refused, and its plan, or the
requirements that the plan answers, tell it from the run without it. What whole runs do with it is in schedule_test,
native_sampler_test, offload_test, schedule_ray_test and, for vLLM, in the tests of its own environment.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from apps.common.cluster import Cluster, Pools
from apps.common.testing.own_sampler import OWN_SAMPLER, OWN_SCHEDULE
from apps.common.testing.setting_effects import Change, field_paths, with_values
from apps.grpo.config import GrpoConfig
from apps.grpo.recipes.qwen3_5_35b_a3b_fsdp2 import RECIPE as LARGE
from apps.grpo.registry import spec_of
from apps.grpo.testing.recipe import RECIPE
from runplan.checks.requirements import requirements
from runplan.report.plan import make_plan
from runplan.report.readiness import refuse_unready
from runplan.run_spec import RunSpec

ASYNC = {"schedule.mode": "fully_async"}
VLLM = {"rollout.engine": "vllm"}
RAY = {"rollout.ray_workers": 1}
OBEYED = {
    "schedule.mode": Change("one_step_off"),
    "schedule.staleness_threshold": Change(1.0, ASYNC),
    "schedule.parameter_sync_step": Change(2, ASYNC),
    "schedule.required_batches": Change(2, ASYNC),
    "schedule.partial_rollout": Change(False, ASYNC),
    "schedule.options": Change(("every=2",), {"schedule.mode": OWN_SCHEDULE}),
    "offload": Change(True),
    "env": Change(("NAME=value",)),
    "rollout.engine": Change("vllm"),
    "rollout.engine_options": Change(("width=3",), {"rollout.engine": OWN_SAMPLER}),
    "rollout.max_model_tokens": Change(4096, VLLM),
    "rollout.max_batched_tokens": Change(4096, VLLM),
    "rollout.dtype": Change("bfloat16", VLLM),
    "rollout.device": Change("cpu", VLLM),
    "rollout.max_requests": Change(8, VLLM),
    "rollout.vllm": Change(("block_size=32",), VLLM),
    "rollout.tp": Change(2, VLLM),
    "rollout.pp": Change(2, VLLM),
    "rollout.dp": Change(2, VLLM),
    "rollout.copies_per_device": Change(2, VLLM | {"rollout.dp": 2}),
    "rollout.weights_on_device": Change(True, VLLM),
    "rollout.sleep": Change(True, VLLM),
    "rollout.ep": Change(2, VLLM | {"rollout.tp": 2}),
    "rollout.chunked_prefill": Change(True, VLLM),
    "rollout.prefix_cache": Change(True, VLLM),
    "rollout.memory_share": Change(0.5, VLLM),
    "rollout.cuda_graph_sizes": Change((1, 2), VLLM),
    "rollout.admit": Change("any_step"),
    "rollout.kv_cache_memory_gib": Change(1e-6),
    "rollout.ray_workers": Change(1),
    "rollout.ray_cpus": Change(2.0, RAY),
    "rollout.ray_nodes": Change(2, VLLM | RAY | {"rollout.tp": 2}),
    "rollout.ray_gpus": Change(1.0, RAY),
    "rollout.weight_transport": Change("gloo", RAY),
    "rollout.ray_address": Change("127.0.0.1:6379", RAY),
}
"""Beside what else they act."""
SIZED = {"pools.device_memory_gib": Change(2000.0)}
"""Obeyed by the plan of a recipe that knows its model's sizes."""
REFUSED = {
    "schedule.weight_sync": Change("shards"),
    "pools.nodes": Change(2),
    "media.images_column": Change("images"),
}
"""What nothing obeys on one machine's processes today."""
APART = ("pools.placement", "pools.rollout_nodes")
"""They come together, and are obeyed where Ray samples."""


def plan_of(changes: Mapping[str, Any], config: GrpoConfig = RECIPE.config) -> RunSpec:
    """The spec of a run with these settings of the cluster."""
    return spec_of(
        replace(config, cluster=with_values(Cluster(), changes)), RECIPE if config is RECIPE.config else None
    )


def test_every_setting_is_in_one_of_the_tables() -> None:
    assert sorted([*OBEYED, *SIZED, *REFUSED, *APART]) == sorted(field_paths(Cluster()))


@pytest.mark.parametrize("path", OBEYED)
def test_what_can_act_is_not_refused_and_is_known_to_the_plan(path: str) -> None:
    change = OBEYED[path]
    without, changed = plan_of(change.both), plan_of({**change.both, path: change.value})
    refuse_unready(changed)
    told = [(str(make_plan(spec)), requirements(spec)) for spec in (without, changed)]
    assert told[0] != told[1]


def test_pools_apart_are_obeyed_where_ray_samples_and_refused_elsewhere() -> None:
    pools = {"pools": Pools(placement="separate", rollout_nodes=1)}
    without, changed = plan_of(RAY), plan_of(RAY | pools)
    refuse_unready(changed)
    assert str(make_plan(without)) != str(make_plan(changed))
    for path in APART:
        name = path.partition(".")[2].replace("_", "-")
        with pytest.raises(ValueError, match=f"{name} .*say --rollout.ray-workers"):
            refuse_unready(plan_of(pools))


def test_memory_is_held_against_a_model_whose_sizes_are_known() -> None:
    plans = [
        str(make_plan(spec_of(replace(LARGE.config, cluster=with_values(Cluster(), changes)))))
        for changes in ({}, {path: change.value for path, change in SIZED.items()})
    ]
    assert plans[0] != plans[1]
    with pytest.raises(ValueError, match="does not know the model's sizes"):
        refuse_unready(plan_of({path: change.value for path, change in SIZED.items()}))


@pytest.mark.parametrize("path", REFUSED)
def test_what_nothing_obeys_is_refused_by_name(path: str) -> None:
    change = REFUSED[path]
    name = path.rpartition(".")[2]
    with pytest.raises(ValueError, match=f"{name}|{name.replace('_', '-')}"):
        refuse_unready(plan_of({**change.both, path: change.value}))
