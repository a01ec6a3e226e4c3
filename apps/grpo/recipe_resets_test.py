"""One flag changes what a recipe runs with: settings of its own that are left without an effect are reset, and told."""

import pytest

from apps.common.cli.flags import SettingsError
from apps.grpo.config import GrpoConfig
from apps.grpo.main import configure
from apps.grpo.recipe_resets import idle_settings
from apps.grpo.registry import recipes

LARGE = "qwen3-235b-a22b-async-npu"


def parsed(*flags: str) -> GrpoConfig:
    return configure(["--recipe", LARGE, *flags])


def test_another_sampler_resets_what_it_does_not_obey(capsys: pytest.CaptureFixture[str]) -> None:
    layout = parsed("--rollout.engine", "native").cluster.rollout
    assert (layout.tp, layout.dp, layout.ep, layout.memory_share, layout.cuda_graph_sizes) == (1, 1, 1, 0.0, None)
    assert layout.ray_workers == 2, "Ray's settings are obeyed"
    said = capsys.readouterr().err
    assert said.startswith("--rollout.engine native leaves these of the recipe without an effect, they are reset: ")
    for change in (
        "tensor-parallel 8 -> 1",
        "data-parallel 8 -> 1",
        "expert-parallel 64 -> 1",
        "gpu-memory-utilization 0.75 -> 0.0",
        "max-batched-tokens 1024 -> None",
    ):
        assert f"--rollout.{change}" in said


@pytest.mark.parametrize(
    ("flags", "paths"),
    [
        (["--objective.kl-coef", "0"], ["objective.kl_estimator"]),
        (["--objective.kl_coef=0.0"], ["objective.kl_estimator"]),
        (["--schedule", "sync"], ["cluster.schedule.staleness_threshold", "cluster.schedule.partial_rollout"]),
        (["--pools.placement", "colocated"], ["cluster.pools.rollout_nodes"]),
    ],
)
def test_what_goes_with_a_flag_goes_with_it(
    flags: list[str], paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    config = parsed(*flags)
    assert set(paths) <= {path for path, _ in idle_settings(config)}
    assert capsys.readouterr().err.count(" -> ") == len(paths)


@pytest.mark.parametrize("name", ["quickstart", "quickstart-code", "quickstart-image"])
def test_a_constant_rate_takes_the_end_of_its_decay_along(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = configure(["--recipe", name, "--trainer.lr-schedule", "constant"]).engine
    assert (engine.lr_schedule, engine.total_steps, engine.min_lr_ratio) == ("constant", None, 0.0)
    said = capsys.readouterr().err
    assert f"--trainer.total-steps {recipes()[name].config.engine.total_steps} -> None" in said
    assert "--trainer.min-lr-ratio" in said


def test_a_setting_whose_flag_was_given_is_refused_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match="kl-estimator='k2' has no effect"):
        parsed("--objective.kl-coef", "0", "--objective.kl-estimator", "k2")
    assert (
        parsed(
            "--rollout.engine", "native", "--rollout.tensor-parallel", "4", "--rollout.expert-parallel", "1"
        ).cluster.rollout.tp
        == 4
    )
    assert "--rollout.tensor-parallel 8" not in capsys.readouterr().err  # the plan refuses it


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_without_such_flags_is_what_it_was(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert configure(["--recipe", name]) == recipes()[name].config
    assert capsys.readouterr().err == ""
