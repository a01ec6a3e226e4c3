import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.common.cli.flags import flag, leaves
from apps.common.run.config_file import dump_config, load_config
from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.main import configure
from apps.grpo.registry import recipes
from apps.grpo.step import correction_line
from engines import EngineConfig
from objectives.off_policy import Correction
from rollout import Sampling
from runlog import health

RECIPES = {name: recipe.config for name, recipe in recipes().items()}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_survives_its_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(dump_config(RECIPES[name]))
    assert load_config(GrpoConfig, path) == RECIPES[name]
    assert RECIPES[name].recipe == name


@pytest.mark.parametrize("name", ["qwen3-5-35b-a3b-megatron", "qwen3-5-122b-a10b-megatron"])
def test_recipes_own_their_environment_and_the_runs_file_says_it(name: str) -> None:
    saved = json.loads(dump_config(RECIPES[name]))
    assert saved["cluster"]["env"] == ["CUDA_DEVICE_MAX_CONNECTIONS=1", "VLLM_ALLREDUCE_USE_SYMM_MEM=0"]


def test_checks_of_health_name_flags_that_exist() -> None:
    named = set(re.findall(r"--[a-z][\w.-]*\w", Path(health.__file__).read_text()))
    assert len(named) > 8
    assert named <= {flag(path) for path, _, _ in leaves(GrpoConfig())}


def test_no_flags_mean_the_quickstart() -> None:
    assert configure([]) == RECIPES["quickstart"]


def test_a_model_or_a_file_asks_for_the_settings_of_real_checkpoints() -> None:
    assert configure(["--model", "dir", "--data", "file.jsonl"]) == replace(
        RECIPES["math"], model=Path("dir"), data=DataConfig(data=Path("file.jsonl"))
    )
    assert configure(["--model=dir", "--recipe", "quickstart"]).recipe == "quickstart"


def test_flags_reach_into_every_group() -> None:
    words = "--learning-rate 0.5 --epochs 2 --objective.clip-high 0.3 --sampling.temperature 0.7 --digits 3"
    config = configure(words.split())
    assert (config.engine.lr, config.objective.clip_high) == (0.5, 0.3)
    assert (config.sampling.temperature, config.data.digits) == (0.7, 3)


@pytest.mark.parametrize(
    ("words", "asked", "holds"),
    [
        ("", None, "none"),
        ("--schedule one_step_off", None, "none"),
        ("--schedule fully_async", None, "mask"),
        ("--schedule fully_async --schedule.staleness-threshold 0", None, "none"),
        ("--schedule fully_async --objective.off-policy none", "none", "none"),
        ("--schedule fully_async --objective.off-policy truncate --objective.off-policy-cap 3", "truncate", "truncate"),
        ("--schedule one_step_off --objective.off-policy mask", "mask", "mask"),
    ],
)
def test_off_policy_weights_follow_the_schedule_unless_they_are_named(
    words: str, asked: Correction | None, holds: Correction, tmp_path: Path
) -> None:
    """The run's file keeps what was asked for, so that it means the same when the run goes on."""
    config, path = configure(words.split()), tmp_path / "config.json"
    path.write_text(dump_config(config))
    assert json.loads(path.read_text())["objective"]["off_policy"] == asked
    for read in (config, load_config(GrpoConfig, path)):
        assert read.corrected_objective == replace(config.objective, off_policy=holds)
    line = correction_line(config)
    assert line is None if asked == holds or holds == "none" else line is not None and holds in line


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        ({"engine": EngineConfig(model="x")}, "--model"),
        ({"engine": EngineConfig(temperature=0.5)}, "--sampling.temperature"),
        ({"sampling": Sampling(seed=1)}, "--seed"),
        ({"sampling": Sampling(greedy=True)}, "must differ"),
        ({"group_size": 1}, "siblings"),
        ({"steps": 0}, "--max-steps must be at least 1"),
        ({"mini_batches": 0}, "--mini-batches must be at least 1"),
    ],
)
def test_settings_without_effect_or_sense_are_refused(change: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        replace(RECIPES["quickstart"], **change)


@pytest.mark.parametrize(
    ("change", "remedy"),
    [({"eval_data": Path("x")}, "--data"), ({"eval_share": 1.0}, "--eval-share"), ({"digits": 0}, "--digits")],
)
def test_data_settings_are_checked(change: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        DataConfig(**change)


def test_all_that_is_wrong_with_a_run_is_told_at_once() -> None:
    with pytest.raises(ValueError, match="--prompts-per-step must be at least 1, got 0") as refusal:
        GrpoConfig(prompts_per_step=0, log_groups=-1, max_episode_seconds=0.0)
    assert [reason.split()[0] for reason in str(refusal.value).split("; ")] == [
        *("--prompts-per-step", "--logging.groups", "--max-episode-seconds")
    ]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "--environment-servers needs --environment-processes"),
        ({"environment_processes": 2, "environment_memory_gib": 1.0}, "give --memory-gib to each server"),
    ],
)
def test_environment_servers_are_told_what_they_play(more: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GrpoConfig(environment_servers=("127.0.0.1:7600",), **more)
    assert GrpoConfig(environment_servers=("127.0.0.1:7600",), environment_processes=2).environment_servers
