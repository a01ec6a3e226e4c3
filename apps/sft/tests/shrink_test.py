"""A shrunk supervised recipe is the recipe but for what is said, and nothing of it is missing."""

import pytest

from apps.common.cli.flags import changed
from apps.common.shrink.command import check_nothing_dropped
from apps.common.shrink.fields import ProcessLimit
from apps.sft.main import shrunk
from apps.sft.registry import recipes, spec_of
from apps.sft.shrink import shrink

RECIPES = recipes()
KINDS = {
    "size": {
        *("data.max_tokens", "data.demonstrations", "batch_size", "steps", "eval_every", "eval_rows", "save_every"),
        *("engine.max_tokens_per_rank", "engine.warmup_steps", "engine.total_steps"),
    },
    "ranks": {
        *("nproc_per_node", "cluster.pools.nodes", "engine.tensor_parallel", "engine.pipeline_parallel"),
        "engine.expert_parallel",
    },
    "device": {"engine.device", "cluster.pools.device_memory_gib"},
}
MANY = ProcessLimit(16)


@pytest.mark.parametrize("name", RECIPES)
def test_only_sizes_rank_counts_and_the_device_differ_and_nothing_is_missing(name: str) -> None:
    config = RECIPES[name].config
    small, differences = shrink(config, RECIPES[name], MANY)
    assert {one.path for one in differences} == set(changed(small, config))
    assert all(one.path in KINDS[one.kind] for one in differences)
    for field in ("tensor_parallel", "pipeline_parallel", "expert_parallel"):
        assert getattr(small.engine, field) == min(2, getattr(config.engine, field))
    assert shrink(small, RECIPES[name], MANY) == (small, ())
    small, recipe, _ = shrunk(config, MANY)
    check_nothing_dropped(spec_of(small, recipe))


def test_the_ratio_of_the_longest_row_to_a_ranks_tokens_stays() -> None:
    recipe = RECIPES["qwen3-30b-a3b-dynamic-cp"]
    config = recipe.config
    small, _ = shrink(config, recipe, MANY)
    ratio = config.data.max_tokens / config.engine.max_tokens_per_rank
    assert small.data.max_tokens / small.engine.max_tokens_per_rank == ratio
    assert small.nproc_per_node == ratio * small.engine.tensor_parallel
