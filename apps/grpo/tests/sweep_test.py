"""Every setting of the grpo app, changed alone, has an effect or is refused (`apps.common.testing.setting_effects`)."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from apps.common.run.divergence import DivergenceError
from apps.common.testing.setting_effects import Change, SettingSweep, field_paths, other_value, with_value
from apps.grpo.config import OWNED, DataConfig, GrpoConfig, PluginConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.recipes.environment import make_tasks as own_tasks_of
from apps.grpo.recipes.math import make_tasks as prompt_tasks_of
from apps.grpo.recipes.quickstart import make_tasks as sum_tasks_of
from apps.grpo.sampling.chat import chat_of
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.train import Result
from apps.quickstart.tokenizer import build_tokenizer
from chat_tools import Format, find_format
from engines import NonFiniteError
from objectives import GRPO
from rollout import EpisodeContext, Reply, Sampling, TaskRow

# Two turns, frequent stops and two updates a batch, so that each setting has something to act on.
BASE = replace(
    RECIPE.config,
    steps=2,
    prompts_per_step=3,
    group_size=2,
    epochs=2,
    max_turns=2,
    eval_every=2,
    save_every=1,
    data=replace(RECIPE.config.data, eval_prompts=2),
    sampling=Sampling(max_new_tokens=7, stop_token_ids=tuple(range(100))),
    objective=GRPO(),
)
NAMED = {"recipe", "model", "run_dir", "resume", "engine.on_nonfinite", "max_episode_seconds", "cluster.rollout.admit"}
NAMED |= {"engine.collective_timeout_seconds", "allow_idle_steps", "engine.prove", "engine.allow_untested"}
NAMED |= {"recipe_options", "environment_processes", "environment_memory_gib", "environment_servers", "stall_seconds"}
"""What a run is of and where it is, changed in config_test, run_test, bad_inputs_test and extensions_test. Losses that
are not finite have a test below, what ends episodes that hang one in schedule_test, when requests begin one in
native_sampler_test; how long ranks wait one in engines' collective_timeout_test, how many steps may train nothing one
in idle_test; environments in processes, their memory, servers and stalls have rollout's pool_test."""
METRIC = "apps.common.testing.setting_effects:step_times"
CHANGES = {
    "engine.weights": Change("replicated"),
    "advantage": Change("rloo"),
    "teachers.teacher": Change(("nowhere/at/all",)),
    "advantage_options": Change(("scale=2",)),
    "metric": Change((METRIC,)),
    "metric_options": Change(("factor=3",), {"metric": (METRIC,)}),
    "engine.family": Change("llama"),
    "engine.family_options": Change(("biases=true",)),
    "nproc_per_node": Change(2),
    "max_turns": Change(1),
    "max_episode_tokens": Change(32),
    "keep_checkpoints": Change(0),
    "tracker": Change(("trackio",)),
    "eval_every": Change(1),
    "save_every": Change(2),
    "warm_start.until_accuracy": Change(0.0),
    "warm_start.warmup_steps": Change(1, {"warm_start.warmup_steps": 3}),
    "warm_start.eval_every": Change(2),
    "warm_start.eval_prompts": Change(2),
    "engine.backend": Change("megatron"),
    "engine.device": Change("cuda"),
    "engine.max_tokens_per_rank": Change(80),
    "engine.context_parallel": Change("dynamic"),
    "engine.dtype": Change("bfloat16"),
    "engine.logit_chunk": Change(8),
    "engine.total_steps": Change(5),
    "engine.betas": Change((0.5, 0.9)),
    "engine.eps": Change(1e-2),
    "engine.weight_decay": Change(0.5),
    "engine.grad_clip": Change(None, {"engine.grad_clip": 1e-3}),
    "engine.warmup_steps": Change(3),
    "engine.lora.targets": Change(("q_proj",)),
    "engine.lora.target_parameters": Change(("experts.down_proj",)),
    "engine.transformer_options": Change(("deallocate_pipeline_outputs=true",)),
    "engine.learning_rates": Change(("embed_tokens=1e-2",)),
    "engine.recheck_every": Change(1),
    "engine.recheck_rows": Change(0),
    "engine.recheck_tokens": Change(2),
    "engine.recheck_bound": Change(1e-12),
    "sampling.max_new_tokens": Change(3),
    "sampling.stop_token_ids": Change(()),
    "sampling.stop": Change(("e",)),
    "shaping.reward_weights": Change(("no_component=2",)),
    "cluster.rollout.cuda_graph_sizes": Change((1, 2)),
    "cluster.rollout.vllm": Change(("block_size=32",)),
    "cluster.env": Change(("NAME=value",)),
    "cluster.rollout.engine": Change("vllm"),
    "cluster.rollout.engine_options": Change(("width=3",)),
    "cluster.schedule.mode": Change("one_step_off"),
    "cluster.schedule.options": Change(("every=2",)),
    "cluster.schedule.partial_rollout": Change(True),  # False is what a run in turn does
    "objective.policy_loss": Change("cispo"),
    "objective.policy_loss_options": Change(("tau=2",)),
    "objective.clip_low": Change(0.001),
    "objective.clip_high": Change(0.001),
    "objective.dual_clip": Change(1.001),
    "objective.max_tokens": Change(8),
    "objective.entropy_coef": Change(0.1),
    "objective.off_policy": Change("truncate"),
    "objective.off_policy_cap": Change(1.5),
    "filter_groups.metric": Change("no_component", {"filter_groups.enable": True}),
}


def go(config: GrpoConfig) -> Result:
    return run(config, RECIPE)


SWEEP = SettingSweep(go, BASE, NAMED | set(OWNED), CHANGES)
WARM = SettingSweep(
    go,
    replace(BASE, data=RECIPE.config.data, warm_start=WarmStart(3, 1.0, 1, 4, batch_size=4, lr=1e-4)),
    SWEEP.left_out,
    CHANGES,
)
"""The same after a warm start, whose settings act there alone."""


def test_equal_settings_make_equal_runs(tmp_path: Path) -> None:
    left = SWEEP.equal_runs(tmp_path)
    assert all(left[name] for name in ("metrics", "episodes", "weights"))


@pytest.mark.parametrize("path", SWEEP.paths())
def test_a_setting_does_something_or_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    sweep = WARM if path.startswith("warm_start.") else SWEEP
    assert sweep.effect(path, tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run_or_is_skipped(tmp_path: Path) -> None:
    """The second update of the batch finds weights that the first has blown up; skipped, the sampler finds them."""
    engine = replace(BASE.engine, lr=1e30, grad_clip=None)
    cases: list[tuple[Literal["stop", "skip"], type[Exception]]] = [("stop", NonFiniteError), ("skip", DivergenceError)]
    for name, error in cases:
        changes: dict[str, Any] = {"steps": 1, "warm_start": WarmStart(), "engine": replace(engine, on_nonfinite=name)}
        with pytest.raises(error, match="finite"):
            go(replace(BASE, run_dir=tmp_path / name, **changes))


OWN_CHANGES = {
    "environment": ("apps.grpo.testing.plugins:Letters",),
    "tasks": Path("other-digits.jsonl"),
    "environment_column": "kind",
    "environment_shares": ("Digits=1", "Letters=9"),
    "system_prompt": "Be brief.",
    "template_options": ("enable_thinking=false",),
    "tool_format": "hermes",
    "tool_format_options": ("begin=<x>",),
    "environment_options": ("word=write",),
    "task_source": "apps.grpo.testing.plugins:Numbers",
    "task_source_options": ("first=5",),
}
BESIDE: dict[str, dict[str, Any]] = {
    "tool_format_options": {"tool_format": "apps.grpo.testing.plugins:marked"},
    "environment_options": {"environment": ("apps.grpo.testing.plugins:TextDigits",)},
    "task_source": {"tasks": None},
    "task_source_options": {"tasks": None, "task_source": "apps.grpo.testing.plugins:Numbers"},
    "reward_options": {"reward": "apps.grpo.testing.plugins:by_length"},
    "tool_options": {"tool": ("apps.grpo.testing.plugins:echo",)},
}
"""What else both have."""
OWN_OF_FILES = {
    "reward": "apps.grpo.testing.plugins:by_reference",
    "tool": ("apps.grpo.testing.plugins:echo",),
    "system_prompt": "Be brief.",
    "preset": "math",
    "reward_options": ("scale=2",),
    "tool_options": ("name=again",),
}


def played(config: GrpoConfig) -> list[Any]:
    """What the first tasks open with and earn, whichever environment they are played in."""

    async def play(environment: Any, row: TaskRow) -> tuple[Any, ...]:
        opening = await environment.open(EpisodeContext(row.id, data=row.data))
        await environment.step(Reply("it is 18 \u00e9", "it is 18 \u00e9"))
        score = await environment.finish("done")
        await environment.close()
        return [dict(m) for m in opening.messages], [tool.name for tool in opening.tools], score

    make = own_tasks_of if config.plugins.environment else prompt_tasks_of
    tasks = make(config, build_tokenizer())
    some = [*tasks.held_out()[:3], *tasks.tasks(0, 12)]
    return [(row.id, asyncio.run(play(tasks.environment(row)(), row))) for row in some]


@pytest.mark.parametrize("name", OWN_CHANGES)
def test_a_setting_of_ones_own_environments_changes_what_is_played(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    two = ("apps.grpo.testing.plugins:Digits", "apps.grpo.testing.plugins:Letters")
    several = name in ("environment_column", "environment_shares")
    own = PluginConfig(
        environment=two if several else two[:1], tasks=Path("train.jsonl" if several else "digits.jsonl")
    )
    base = GrpoConfig(recipe="environment", plugins=replace(own, **BESIDE.get(name, {})))
    assert played(base) == played(base)
    changed = with_value(base, f"plugins.{name}", OWN_CHANGES[name])
    if name == "template_options":  # they change the tokens, not the messages
        chats = [chat_of(config, build_tokenizer()) for config in (base, changed)]
        assert chats[0].options != chats[1].options
    elif name == "tool_format_options":
        formats = [chat_of(config, build_tokenizer()).tool_format for config in (base, changed)]
        assert [form.calls[0][0] for form in formats if isinstance(form, Format)] == ["<call>", "<x>"]
    elif name == "tool_format":  # what is read of an answer, not what is asked
        chats = [chat_of(config, build_tokenizer()) for config in (base, changed)]
        assert (chats[0].tool_format, chats[1].tool_format) == ("qwen3_xml", find_format("hermes"))
    elif name == "environment_column":
        with pytest.raises(ValueError, match="--environment-column"):
            played(changed)
    else:
        assert played(changed) != played(base)


@pytest.mark.parametrize("name", OWN_OF_FILES)
def test_a_setting_of_ones_own_for_a_file_changes_what_is_asked_or_earned(
    name: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files)
    data = DataConfig(data=Path("train.jsonl"), eval_share=0.2)
    tools = name.startswith("tool")
    plugins = PluginConfig(**BESIDE.get(name, {}))
    base = GrpoConfig(recipe="math", max_turns=2 if tools else 1, data=data, plugins=plugins)
    if name == "tool":
        with pytest.raises(ValueError, match="--max-turns"):
            played(base)
        base = with_value(base, "max_turns", 1)
    changed = with_value(base, f"plugins.{name}", OWN_OF_FILES[name])
    assert played(with_value(changed, "max_turns", 2) if name == "tool" else changed) != played(base)


def test_every_setting_of_ones_own_is_changed_here() -> None:
    of_own = {path.removeprefix("plugins.") for path in field_paths(BASE) if path.startswith("plugins.")}
    assert of_own == set(OWN_CHANGES) | set(OWN_OF_FILES)


def tasks_of(config: GrpoConfig) -> tuple[Any, ...]:
    """What is asked: a pure function of the settings and the files."""
    make = sum_tasks_of if config.recipe == "quickstart" else prompt_tasks_of
    tasks = make(config, build_tokenizer())
    rows = [tasks.held_out(), tasks.tasks(0, 20), tasks.tasks(1, 40)]
    return [[tasks.environment(row).messages for row in some] for some in rows], rows, dict(tasks.skipped)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name in ("train", "eval"):
        rows: list[dict[str, Any]] = [
            {"question": f"{name} {i}" + "?" * i, "ask": f"{i}", "answer": i, "gold": 2 * i} for i in range(1, 31)
        ]
        for row in rows:
            row |= {"problem": row["ask"], "solution": row["answer"], "number": name + row["ask"]}
            row["environment"] = "Digits" if row["answer"] % 2 else "Letters"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        of_one = "".join(json.dumps({"number": row["number"]}) + "\n" for row in rows)
        (folder / {"train": "digits.jsonl", "eval": "other-digits.jsonl"}[name]).write_text(of_one)
    return folder


DATA_CHANGES = {
    "data": Path("eval.jsonl"),
    "eval_data": Path("eval.jsonl"),
    "prompt_column": "ask",
    "answer_column": "gold",
    "eval_share": 0.5,
    "max_prompt_tokens": 40,
    "eval_prompts": 1,
}


@pytest.mark.parametrize("name", [path.removeprefix("data.") for path in field_paths(BASE) if path.startswith("data.")])
def test_a_setting_of_the_data_changes_what_is_asked(name: str, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    data = DataConfig(data=Path("train.jsonl"), eval_share=0.05 if name == "eval_data" else 0.2)
    base = GrpoConfig(recipe="math", max_turns=1, data=data)
    if name in DATA_CHANGES:
        assert tasks_of(base) == tasks_of(base)
        assert tasks_of(with_value(base, f"data.{name}", DATA_CHANGES[name])) != tasks_of(base)
    else:
        with pytest.raises(ValueError, match=f"--{name.replace('_', '-')}"):
            tasks_of(with_value(base, f"data.{name}", other_value(DataConfig, name, getattr(data, name))))
        sums = GrpoConfig(recipe="quickstart", max_turns=1)
        assert tasks_of(
            with_value(sums, f"data.{name}", other_value(DataConfig, name, getattr(data, name)))
        ) != tasks_of(sums)


def test_the_seed_and_the_recipe_of_the_tasks_matter(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    base = GrpoConfig(recipe="math", max_turns=1, data=DataConfig(data=Path("train.jsonl"), eval_share=0.2))
    assert tasks_of(replace(base, seed=1))[0][1] != tasks_of(base)[0][1]
    assert tasks_of(replace(base, seed=1))[0][0] == tasks_of(base)[0][0]
