"""What the scripts that recipes cite ask for, by setting: a recipe has the same value, or says the deviation."""

from operator import attrgetter
from typing import Any

import pytest

from apps.grpo.registry import recipes, spec_of
from runplan.report.plan import make_plan


class Deviates(str):
    """The words of the deviation that a recipe lists."""


GPU_27B: dict[str, Any] = {
    "engine.backend": "fsdp2",
    "engine.vision": "trained",
    "engine.gradient_checkpointing": True,
    "engine.optimizer_on_host": True,
    "engine.lr": 1e-6,
    "objective.kl_coef": 0.01,
    "objective.entropy_coef": 0.0,
    "group_size": 5,
    "save_every": 5,
    "eval_every": 5,
    "cluster.offload": True,
    "cluster.media.images_column": "images",
    "cluster.rollout.tp": 4,
    "cluster.rollout.memory_share": 0.6,
    "cluster.rollout.max_batched_tokens": 8192,
    "cluster.rollout.chunked_prefill": True,
    "cluster.rollout.prefix_cache": False,
    "data.eval_data": Deviates("5 % of the training rows are held out"),
    "shuffle": Deviates("the script kept the file's order"),
    "bucket": Deviates("no bucket of 6144 MB"),
}
NPU_27B = {**GPU_27B, "nproc_per_node": 16, "engine.device": "npu"}
MEGATRON: dict[str, Any] = {
    "engine.backend": "megatron",
    "engine.vision": "trained",
    "engine.gradient_checkpointing": True,
    "engine.optimizer_on_host": True,
    "engine.tensor_parallel": 2,
    "engine.expert_parallel": 8,
    "engine.lr": 1e-6,
    "objective.entropy_coef": 0.0,
    "cluster.offload": True,
    "cluster.media.images_column": "images",
    "cluster.rollout.tp": 8,
    "cluster.rollout.prefix_cache": Deviates("no prefix cache"),
    "data.eval_data": Deviates("5 % of the training rows are held out"),
    "padding": Deviates("rows are packed, not padded"),
    "grad_offload": Deviates("grad_offload was read by nobody"),
}
SCRIPTS: dict[str, dict[str, Any]] = {
    "qwen3-5-27b-fsdp2": GPU_27B,
    "qwen3-5-27b-fsdp2-npu": NPU_27B,
    "qwen3-5-35b-a3b-fsdp2": GPU_27B,
    "qwen3-5-35b-a3b-fsdp2-npu": NPU_27B,
    "qwen3-5-35b-a3b-megatron": {
        **MEGATRON,
        "engine.pipeline_parallel": 1,
        "engine.router_aux_loss_coef": 0.01,
        "engine.router_z_loss_coef": 0.001,
        "objective.kl_coef": 0.01,
        "group_size": 5,
        "save_every": 20,
        "eval_every": 5,
        "cluster.rollout.memory_share": 0.6,
    },
    "qwen3-5-122b-a10b-megatron": {
        **MEGATRON,
        "engine.pipeline_parallel": 2,
        "engine.collective_timeout_seconds": 10_800,
        "objective.kl_coef": 0.0,
        "group_size": 6,
        "save_every": 50,
        "eval_every": 10,
        "cluster.pools.nodes": 4,
        "cluster.rollout.memory_share": 0.66,
        "cluster.rollout.max_model_tokens": 15_768,
        "bucket": Deviates("no bucket of 4096 MB"),
    },
    "qwen3-235b-a22b-async-npu": {
        "engine.backend": "megatron",
        "engine.device": "npu",
        "engine.tensor_parallel": 4,
        "engine.pipeline_parallel": 8,
        "engine.expert_parallel": 4,
        "engine.first_stage_layers": 11,
        "engine.last_stage_layers": 11,
        "engine.gradient_checkpointing": True,
        "engine.lr": 1e-6,
        "engine.weight_decay": 0.1,
        "objective.kl_coef": 0.001,
        "group_size": 16,
        "save_every": 100,
        "eval_every": Deviates("the script never evaluates"),
        "cluster.offload": Deviates("nothing is offloaded: the script offloads weights and optimizer"),
        "cluster.rollout.tp": 8,
        "cluster.rollout.dp": 8,
        "cluster.rollout.ep": 64,
        "cluster.rollout.memory_share": 0.75,
        "cluster.rollout.max_batched_tokens": 1024,
        "cluster.rollout.chunked_prefill": True,
        "cluster.rollout.prefix_cache": True,
        "cluster.schedule.staleness_threshold": 0.5,
        "cluster.schedule.parameter_sync_step": 1,
        "cluster.schedule.required_batches": 1,
        "cluster.schedule.partial_rollout": True,
        "steps": Deviates("583 steps are 10 epochs"),
    },
}


def test_every_recipe_with_a_script_has_its_table() -> None:
    assert set(SCRIPTS) == {name for name, recipe in recipes().items() if recipe.origin is not None}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_recipe_follows_its_script_or_says_the_deviation(name: str) -> None:
    recipe = recipes()[name]
    told = make_plan(spec_of(recipe.config)).sections["Deviates"]
    for path, wanted in SCRIPTS[name].items():
        if isinstance(wanted, Deviates):
            assert [line for line in told if wanted in line], (path, wanted)
        else:
            assert attrgetter(path)(recipe.config) == wanted, path


def test_a_plan_counts_the_rows_that_are_held_out() -> None:
    config = recipes()["qwen3-5-27b-fsdp2"].config
    assert "passes over 1996 (105 of 2101 are held out: no --eval-data)" in str(make_plan(spec_of(config)))
