"""A shrunk recipe is the recipe but for what is said; what it would do without is named, and nothing runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.common.cli.flags import changed
from apps.common.cluster import Cluster, RolloutLayout
from apps.common.shrink.command import check_nothing_dropped
from apps.common.shrink.fields import RANKS, ProcessLimit, value_at
from apps.common.shrink.flag import parse_shrink_flag
from apps.common.shrink.model import tiny_shape, transformers_config
from apps.common.testing.weight_delta import load_tensors
from apps.grpo.config import GrpoConfig
from apps.grpo.main import main, run_shrunk, shrunk
from apps.grpo.registry import recipes, spec_of
from apps.grpo.shrink.shrink import shrink, supplied
from apps.grpo.testing.recipe import RECIPE
from engines.families.registry import family_of
from engines.media.image_reader import ImageReader

RECIPES = recipes()
SEEDS = [name for name, recipe in RECIPES.items() if recipe.origin is not None]
APART = "qwen3-235b-a22b-async-npu"
SIZES = {
    *(
        "steps",
        "prompts_per_step",
        "group_size",
        "mini_batches",
        "epochs",
        "eval_every",
        "save_every",
        "max_episode_tokens",
    ),
    *("data.max_prompt_tokens", "data.eval_prompts", "sampling.max_new_tokens"),
    *("warm_start.steps", "warm_start.eval_every", "warm_start.eval_prompts", "warm_start.batch_size"),
    *("warm_start.warmup_steps", "engine.warmup_steps", "engine.total_steps", "engine.max_tokens_per_rank"),
    *("cluster.rollout.max_model_tokens", "cluster.rollout.max_batched_tokens"),
}
COUNTS = {
    *("nproc_per_node", "engine.tensor_parallel", "engine.pipeline_parallel", "engine.virtual_pipeline_parallel"),
    *("engine.expert_parallel", "engine.expert_tensor_parallel", "engine.context_parallel"),
    *("engine.first_stage_layers", "engine.last_stage_layers", "cluster.pools.nodes", "cluster.pools.rollout_nodes"),
    *(
        "cluster.rollout.tp",
        "cluster.rollout.pp",
        "cluster.rollout.dp",
        "cluster.rollout.ep",
        "cluster.rollout.ray_workers",
    ),
}
DEVICE = {
    *("engine.device", "cluster.pools.device_memory_gib", "cluster.rollout.memory_share"),
    *("cluster.rollout.cuda_graph_sizes", "cluster.rollout.copies_per_device", "cluster.rollout.weights_on_device"),
    *("cluster.rollout.sleep", "cluster.rollout.device"),
}
KINDS = {"size": SIZES, "ranks": COUNTS, "device": DEVICE}
SMALL_GAP = 1e-3
"""Between the sampler's log-probs and the trainer's: both see the same image in the same place, or it is far larger."""
MANY = ProcessLimit(32)
"""Processes that two ranks of each parallelism never exceed."""


@pytest.mark.parametrize("name", RECIPES)
def test_only_sizes_rank_counts_and_the_device_differ_and_every_difference_is_told(name: str) -> None:
    recipe = RECIPES[name]
    small, differences = shrink(recipe.config, recipe, MANY)
    assert {one.path for one in differences} == set(changed(small, recipe.config))
    for one in differences:
        assert one.path in KINDS[one.kind]
        assert (one.before, one.after) == (value_at(recipe.config, one.path), value_at(small, one.path))
        assert str(one.before) in str(one)
        assert str(one.after) in str(one)


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_above_one_stays_so_and_nothing_grows(name: str) -> None:
    recipe = RECIPES[name]
    small, differences = shrink(recipe.config, recipe, MANY)
    for one in differences:
        if one.path in ("cluster.pools.nodes", "cluster.pools.rollout_nodes", "nproc_per_node") or one.path.endswith(
            "warmup_steps"
        ):
            continue
        if isinstance(one.before, int) and one.before > 1 and isinstance(one.after, int):
            assert 1 < one.after < one.before or one.path.endswith("stage_layers"), one
    assert (
        small.nproc_per_node * small.cluster.pools.nodes
        <= recipe.config.nproc_per_node * recipe.config.cluster.pools.nodes
    )
    assert spec_of(small).grid.dp == min(2, spec_of(recipe.config).grid.dp)
    assert shrink(small, recipe, MANY) == (small, ())


@pytest.mark.parametrize(
    ("shards", "context_parallel", "small_shards", "processes"),
    [
        (4, "off", 2, 4),
        (1, "off", 1, 2),
        (8, "off", 2, 2),
        (4, "static:2", 2, 4),
        (4, "dynamic", 2, 4),
        (1, "dynamic", 1, 2),
    ],
)
def test_copies_and_shards_of_the_weights_stay_several(
    shards: int, context_parallel: str, small_shards: int, processes: int
) -> None:
    recipe = RECIPES["qwen3-5-27b-fsdp2"]
    engine = replace(recipe.config.engine, shard_ranks=shards, context_parallel=context_parallel)
    small, differences = shrink(replace(recipe.config, engine=engine), recipe, MANY)
    assert (small.engine.shard_ranks, small.nproc_per_node) == (small_shards, processes)
    assert shrink(small, recipe, MANY) == (small, ())
    assert {one.path for one in differences if one.kind == "ranks"} <= COUNTS | {"engine.shard_ranks"}
    if processes == 4:
        with pytest.raises(ValueError, match="are 4 processes: allow them by --shrink=4"):
            shrink(replace(recipe.config, engine=engine), recipe, ProcessLimit(2))


@pytest.mark.parametrize(
    ("processes", "most", "fix"),
    [
        (128, 8, r"allow more by --shrink=12$"),
        (8, 8, r"the run's own 16 ranks are the limit, not --shrink: plan it for 64 \(--nproc-per-node, "),
        (8, 12, r"the run's own 16 ranks are the limit, not --shrink: plan it for 64 \(--nproc-per-node, "),
    ],
)
def test_too_few_ranks_for_experts_are_told_by_what_limits_them(processes: int, most: int, fix: str) -> None:
    """More processes of --shrink help where the run has them; what is proposed works."""
    recipe = RECIPES[APART]
    config = replace(recipe.config, nproc_per_node=processes)
    config = replace(config, cluster=replace(config.cluster, pools=replace(config.cluster.pools, nodes=2)))
    with pytest.raises(ValueError, match=fix):
        shrink(config, recipe, ProcessLimit(most))
    plenty = replace(config, nproc_per_node=max(processes, 32))
    assert shrink(plenty, recipe, ProcessLimit(12))[0].nproc_per_node == 12


def test_experts_that_no_number_of_ranks_holds_are_told_so() -> None:
    recipe = RECIPES["qwen3-5-35b-a3b-megatron"]
    engine = replace(recipe.config.engine, tensor_parallel=1, expert_parallel=2, expert_tensor_parallel=2)
    with pytest.raises(ValueError, match=r"no --shrink allows more, leave out --parallel.expert or"):
        shrink(replace(recipe.config, engine=engine), recipe, MANY)


@pytest.mark.parametrize("name", SEEDS)
def test_the_model_is_of_the_same_architecture_in_small(name: str) -> None:
    recipe = RECIPES[name]
    small, _, _ = shrunk(recipe.config, MANY)
    assert recipe.origin is not None
    real = recipe.origin.shape
    assert real is not None
    shape = tiny_shape(real, small.engine.pipeline_parallel, small.engine.tensor_parallel)
    same = ["model_type", "gated_attention", "full_attention_interval", "linear_conv_width", "tied_embeddings"]
    same += ["vision"]
    assert [getattr(shape, field) for field in same] == [getattr(real, field) for field in same]
    assert bool(shape.experts) == bool(real.experts)
    assert bool(shape.shared_expert_intermediate) == bool(real.shared_expert_intermediate)
    assert shape.heads * real.kv_heads == real.heads * shape.kv_heads
    config = transformers_config(shape, 0, 1)
    assert config.get_text_config().model_type == real.model_type
    family_of(config).check_config(config)


def test_a_model_of_delta_nets_alone_stays_one_in_small() -> None:
    origin = RECIPES["qwen3-5-27b-fsdp2"].origin
    assert origin is not None
    assert origin.shape is not None
    shape = tiny_shape(replace(origin.shape, attention_layers=0), 1, 1)
    assert set(transformers_config(shape, 0, 1).get_text_config().layer_types) == {"linear_attention"}


@pytest.mark.parametrize("name", SEEDS)
def test_a_shrunk_run_does_without_nothing_but_what_is_named(name: str) -> None:
    """Images go through several of vLLM's workers too, on the CPU beside an NPU; pools are apart in Ray."""
    if RECIPES[name].config.cluster.rollout.engine == "vllm":
        pytest.importorskip("rollout.vllm")
    small, recipe, differences = shrunk(RECIPES[name].config, MANY)
    on_npus = small.engine.device == "npu"
    moved = [str(one).split() for one in differences if one.path == "cluster.rollout.device"]
    assert moved == [["device", "--rollout.device", "auto", "->", "cpu"]] * on_npus
    check_nothing_dropped(spec_of(small, recipe))


@pytest.mark.parametrize("name", [name for name in SEEDS if RECIPES[name].config.engine.device == "npu"])
def test_whole_npu_recipes_still_want_what_no_test_has_run_on_one(name: str) -> None:
    with pytest.raises(ValueError, match="vLLM beside NPUs: No"):
        check_nothing_dropped(spec_of(RECIPES[name].config))


def test_experts_over_copies_of_the_whole_recipe_wait_for_an_accelerator() -> None:
    """Shrunk, they are on the CPU, and run."""
    with pytest.raises(
        ValueError, match=r"--rollout.expert-parallel 64: No\(experts over the copies .* no accelerator"
    ):
        check_nothing_dropped(spec_of(RECIPES[APART].config))


def test_the_device_of_a_flag_counts() -> None:
    """A recipe for NPUs on the CPU, as it is asked for: whole, then."""
    pytest.importorskip("rollout.vllm")
    config = RECIPES["qwen3-5-27b-fsdp2-npu"].config
    small, recipe, _ = shrunk(replace(config, engine=replace(config.engine, device="cpu")), MANY)
    assert small.engine.device == "cpu"
    check_nothing_dropped(spec_of(small, recipe))


def without_ray() -> GrpoConfig:
    """The recipe whose pools are apart, with nothing that samples on nodes of its own."""
    pytest.importorskip("rollout.vllm")
    config = RECIPES[APART].config
    return replace(config, cluster=replace(config.cluster, rollout=replace(config.cluster.rollout, ray_workers=0)))


def test_what_a_shrunk_run_would_do_without_is_named_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its No; and no process, no folder and no model is made."""
    name = APART
    config = replace(without_ray(), run_dir=tmp_path / "run")
    with pytest.raises(ValueError, match="nothing is left out silently") as refusal:
        run_shrunk(config, MANY)
    small, recipe, _ = shrunk(config, MANY)
    layout = small.cluster.rollout
    assert "--rollout.data-parallel 2: No(" not in str(refusal.value)
    assert (layout.device, layout.experts_over_copies) == ("cpu", True)
    assert "--rollout.expert-parallel" not in str(refusal.value)
    text = replace(small.engine, vision="off")
    rest = replace(small, engine=text, cluster=Cluster(env=small.cluster.env))
    if small.engine.backend == "megatron":
        check_nothing_dropped(spec_of(rest, recipe))
    assert f"{name}, shrunk" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_flags_that_leave_something_out_are_proposed() -> None:
    with pytest.raises(ValueError) as refusal:
        run_shrunk(without_ray(), MANY)
    proposed = str(refusal.value).partition("by name: ")[2].split()
    assert "--trainer.no-optimizer-on-host" not in proposed
    assert "--rollout.expert-parallel" not in proposed  # on the CPU, where copies share experts
    assert "--pools.placement" in proposed
    argv = ["--recipe", APART, "--shrink", "--rollout.ray-workers", "0", *proposed, "--plan"]
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 0


@pytest.mark.parametrize(("name", "processes"), [(APART, 12), ("qwen3-5-122b-a10b-megatron", 8)])
def test_without_a_number_there_are_as_many_processes_as_two_ranks_of_each_parallelism_need(
    name: str, processes: int
) -> None:
    assert shrunk(RECIPES[name].config, ProcessLimit())[0].nproc_per_node == processes
    assert processes >= RANKS


def test_processes_are_bounded_and_said() -> None:
    assert parse_shrink_flag(["--shrink", "--max-steps", "3"]) == (["--max-steps", "3"], ProcessLimit())
    assert parse_shrink_flag(["--shrink=4"]) == ([], ProcessLimit(4))
    assert parse_shrink_flag(["--seed", "1"]) == (["--seed", "1"], None)
    for word in ("--shrink=0", "--shrink=many", "--shrink=-1"):
        with pytest.raises(ValueError, match="such as --shrink=4"):
            parse_shrink_flag([word])
    with pytest.raises(ValueError, match="two ranks of each parallelism are 4 processes: allow them by --shrink=4"):
        shrunk(RECIPES["qwen3-5-122b-a10b-megatron"].config, ProcessLimit(2))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"model": Path("x")}, "leave --model out"), ({"resume": True}, "goes on without --shrink")],
)
def test_settings_that_shrinking_has_no_place_for_are_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = replace(RECIPE.config, run_dir=tmp_path / "run", **change)
    with pytest.raises(ValueError, match=words):
        run_shrunk(config, ProcessLimit())


def test_pictures_are_drawn_in_the_recipes_columns(tmp_path: Path) -> None:
    """Laid out as geo3k, of several sizes; the model's directory says how it cuts them."""
    small, recipe, _ = shrunk(RECIPES["qwen3-5-27b-fsdp2"].config, MANY)
    supplied_config = supplied(small, recipe, tmp_path / "run")
    assert supplied_config.data.data is not None
    rows = [json.loads(line) for line in supplied_config.data.data.read_text().splitlines()]
    assert supplied_config.model is not None
    reader = ImageReader.of(supplied_config.model)
    grids = [reader(row["images"])[1].tolist() for row in rows]
    assert {len(images) for images in grids} == {1}
    assert len({tuple(images[0]) for images in grids}) == 3
    assert all(row["prompt"][0]["content"].startswith("<image>") for row in rows)
    assert all(row["reward_model"]["ground_truth"].isdigit() for row in rows)


def assert_runs_with_images(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it but vLLM: the tower trained on two ranks, a frozen reference policy that sees, the host's memory."""
    config = RECIPES[name].config
    cluster = replace(config.cluster, rollout=RolloutLayout())
    run_dir = tmp_path / "run"
    assert run_shrunk(replace(config, cluster=cluster, steps=2, run_dir=run_dir), ProcessLimit(2)).steps == 2
    output = capsys.readouterr().out
    assert "flag   --rollout.engine  vllm -> native" in output
    assert "images-column" not in output
    assert "--trainer.vision" not in output
    assert "offload" not in output
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert all(row["log_prob_difference_max"] < SMALL_GAP for row in rows[1:])
    before, after = (load_tensors(run_dir / at) for at in ("model", "export"))
    assert before.keys() == after.keys()
    tower = [key for key in before if key.startswith("model.visual.")]
    assert sum(not before[key].equal(after[key]) for key in tower) > len(tower) / 2
    assert all(row["train/kl"] >= 0 for row in rows[1:])


def test_a_script_with_images_runs_from_end_to_end_with_the_native_sampler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dense one: dense_images_test."""
    assert_runs_with_images("qwen3-5-35b-a3b-fsdp2", tmp_path, capsys)


def test_the_text_part_of_a_recipe_runs_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The 27B script without what is missing: FSDP2 on two ranks, mini-batches, the KL penalty, recomputed layers,
    optimizer states on the host."""
    config = RECIPES["qwen3-5-27b-fsdp2"].config
    left = replace(config, cluster=Cluster(), engine=replace(config.engine, vision="off"), steps=2)
    assert left.engine.optimizer_on_host
    result = run_shrunk(replace(left, run_dir=tmp_path / "run"), ProcessLimit(2))
    assert result.steps == 2
    assert "flag   --media.images-column  images -> None" in capsys.readouterr().out
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
