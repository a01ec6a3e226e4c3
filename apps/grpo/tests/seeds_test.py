"""The recipes that restate launch scripts: they plan without a problem, keep the values, and name what lacks."""

import re
from pathlib import Path

import pytest
from transformers import Qwen3_5MoeTextConfig

from apps.grpo.commands.plan_page import page
from apps.grpo.main import main
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import QWEN3_5_35B_A3B
from apps.grpo.registry import recipes, runnable, spec_of
from engines import Unsupported
from runplan.layout.grid import Grid
from runplan.model.model_shape import count_parameters
from runplan.report.plan import make_plan

SEEDS = {name: recipe for name, recipe in recipes().items() if recipe.origin is not None}
SPECS = {name: spec_of(recipe.config) for name, recipe in SEEDS.items()}
# name -> training ranks, dp, mini-batch prompts, group size, prompt and response tokens, as in the scripts.
SCRIPTS = {
    "qwen3-5-122b-a10b-megatron": (32, 8, 64, 6, 3240, 4096),
    "qwen3-5-35b-a3b-megatron": (8, 4, 32, 5, 1024, 2048),
    "qwen3-5-27b-fsdp2": (8, 8, 16, 5, 1024, 2048),
    "qwen3-5-27b-fsdp2-npu": (16, 16, 16, 5, 1024, 2048),
    "qwen3-5-35b-a3b-fsdp2": (8, 8, 16, 5, 1024, 2048),
    "qwen3-5-35b-a3b-fsdp2-npu": (16, 16, 16, 5, 1024, 2048),
    "qwen3-235b-a22b-async-npu": (128, 4, 128, 16, 8192, 4096),
}


READY = ("qwen3-5-27b-fsdp2", "qwen3-5-35b-a3b-fsdp2", "qwen3-5-35b-a3b-megatron")
"""Of which nothing lacks but the devices."""


def test_every_script_has_its_recipe() -> None:
    assert set(SEEDS) == set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_values_are_the_scripts(name: str) -> None:
    ranks, dp, mini_batch, group, prompt, response = SCRIPTS[name]
    config, spec = SEEDS[name].config, SPECS[name]
    assert (spec.ranks, spec.grid.dp, config.prompts_per_step // config.mini_batches) == (ranks, dp, mini_batch)
    assert (config.group_size, config.data.max_prompt_tokens, config.sampling.max_new_tokens) == (
        group,
        prompt,
        response,
    )
    assert config.max_episode_tokens == prompt + response
    assert config.engine.lr == 1e-6
    assert config.engine.gradient_checkpointing


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_parameters_are_those_that_the_name_promises(name: str) -> None:
    origin = SPECS[name].origin
    assert origin is not None
    assert origin.shape is not None
    shape = origin.shape
    match = re.fullmatch(r"Qwen3(?:\.5)?-(\d+)B(?:-A(\d+)B)?", shape.name)
    assert match is not None
    total, active = match.groups()
    count = count_parameters(shape)
    assert count.total == pytest.approx(float(total) * 1e9, rel=0.015)
    # What is called active leaves out the embedding for the smallest of them.
    assert count.active == pytest.approx(float(active or total) * 1e9, rel=0.2)


def test_the_published_defaults_are_the_sizes_of_the_35b_model() -> None:
    config, shape = Qwen3_5MoeTextConfig(), QWEN3_5_35B_A3B
    pairs = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_intermediate,
        "shared_expert_intermediate_size": shape.shared_expert_intermediate,
        "linear_num_key_heads": shape.linear_key_heads,
        "linear_num_value_heads": shape.linear_value_heads,
        "linear_key_head_dim": shape.linear_head_dim,
        "linear_conv_kernel_dim": shape.linear_conv_width,
        "model_type": shape.model_type,
    }
    assert {name: getattr(config, name) for name in pairs} == pairs
    assert config.layer_types.count("full_attention") == shape.full_attention_layers


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_plan_has_no_problem_and_names_every_field_that_lacks(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--recipe", name, "--plan"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "PROBLEM" not in text
    plan = make_plan(SPECS[name])
    assert not plan.problems
    assert bool(plan.missing) == (name not in READY)
    for requirement in plan.missing:  # reasons are folded over lines
        assert isinstance(requirement.answer, Unsupported)
        assert f"No({requirement.answer.reason})" in " ".join(text.split())
    assert all(requirement.feature in text for requirement in plan.missing)
    origin = SEEDS[name].origin
    assert origin is not None
    assert all(line in text for line in origin.deviations)


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name not in READY])
def test_a_recipe_that_is_not_ready_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"recipe '{name}' can't be run .*--plan says all"):
        runnable(SEEDS[name].config)


def test_layouts_and_stages() -> None:
    assert SPECS["qwen3-5-122b-a10b-megatron"].grid == Grid(tp=2, cp=1, dp=8, pp=2, etp=1, ep=8, edp=2)
    assert SPECS["qwen3-235b-a22b-async-npu"].grid == Grid(tp=4, cp=1, dp=4, pp=8, etp=4, ep=4, edp=1)
    sections = make_plan(SPECS["qwen3-235b-a22b-async-npu"]).sections
    assert sections["Stages"][0] == "11 + 12 + 12 + 12 + 12 + 12 + 12 + 11 layers over 8 stages"
    assert "2 replicas over 128 devices" in sections["Rollout"][0]
    assert SPECS["qwen3-235b-a22b-async-npu"].rollout_ranks == 128


def test_flags_change_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--plan", "--recipe", "qwen3-5-122b-a10b-megatron", "--parallel.tensor", "4"])
    assert stop.value.code == 1
    assert (
        "PROBLEM   2 key-value heads do not divide over tp = 4: lower tp to a divisor of 2" in capsys.readouterr().out
    )


def test_the_list_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--recipe", "list", "--plan"])
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == "18 recipes, 12 can be run today, 3 untested, 18 shrunk"


def test_the_committed_plans_are_current() -> None:
    """`python -m apps.grpo.commands.plan_page` writes the page anew."""
    assert (Path(__file__).parents[3] / "docs" / "plans.md").read_text() == page()
