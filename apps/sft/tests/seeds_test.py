"""The recipes that restate launch scripts: they plan without a problem, keep the values, and name what lacks."""

import pytest

from apps.sft.main import main
from apps.sft.registry import recipes, runnable, spec_of
from runplan.layout.grid import Grid
from runplan.model.model_shape import count_parameters
from runplan.report.plan import make_plan

MISSING = ("qwen3-5-397b-a17b-megatron",)
"""Scripts that need what is not there: Megatron on a GPU, several machines."""
SEEDS = {name: recipe for name, recipe in recipes().items() if recipe.origin is not None}


def test_every_script_has_its_recipe() -> None:
    assert set(SEEDS) == {"qwen3-5-397b-a17b-megatron", "qwen3-30b-a3b-dynamic-cp"}


def test_the_397b_script() -> None:
    config = SEEDS["qwen3-5-397b-a17b-megatron"].config
    spec = spec_of(config)
    assert spec.grid == Grid(tp=2, cp=1, dp=16, pp=4, etp=1, ep=32, edp=1)
    assert (config.batch_size, config.data.max_tokens, config.save_every) == (128, 2048, 500)
    engine = config.engine
    assert (engine.lr, engine.min_lr_ratio, engine.warmup_steps) == (2e-5, 0.1, 10)
    assert (engine.betas, engine.weight_decay, engine.grad_clip) == ((0.9, 0.95), 0.1, 1.0)
    assert make_plan(spec).sections["Stages"][0] == "15 + 15 + 15 + 15 layers over 4 stages"


@pytest.mark.parametrize(
    ("name", "total", "active"), [("qwen3-5-397b-a17b-megatron", 397, 17), ("qwen3-30b-a3b-dynamic-cp", 30.5, 3.3)]
)
def test_the_parameters_are_those_that_the_name_promises(name: str, total: float, active: float) -> None:
    origin = SEEDS[name].origin
    assert origin is not None
    assert origin.shape is not None
    count = count_parameters(origin.shape)
    assert count.total == pytest.approx(total * 1e9, rel=0.01)
    assert count.active == pytest.approx(active * 1e9, rel=0.03)


@pytest.mark.parametrize("name", SEEDS)
def test_it_is_planned_and_refused_by_name(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in SEEDS[name].config.cluster.env:  # as the command starts itself again with them
        monkeypatch.setenv(*entry.split("="))
    with pytest.raises(SystemExit) as stop:
        main(["--recipe", name, "--plan"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "PROBLEM" not in text
    refused = name in MISSING
    assert ("MISSING" in text) == refused
    lack = f"recipe '{name}' can't be run .*--plan says all" if refused else "has no model of its own: add --model"
    with pytest.raises(ValueError, match=lack):
        runnable(SEEDS[name].config)


def test_the_dynamic_script_is_on_the_backend_that_it_was_written_for() -> None:
    config = SEEDS["qwen3-30b-a3b-dynamic-cp"].config
    assert (config.engine.backend, config.engine.context_parallel) == ("megatron", "dynamic")
    spec = spec_of(config)
    assert spec.grid == Grid(tp=2, cp=1, dp=4, pp=1, etp=1, ep=8, edp=1)
    assert spec.grid.dp * config.engine.max_tokens_per_rank == config.data.max_tokens


def test_a_longer_conversation_takes_more_ranks() -> None:
    text = str(make_plan(spec_of(SEEDS["qwen3-30b-a3b-dynamic-cp"].config)))
    assert "1 to 4 ranks share a sequence, chosen for each micro-batch, each of tp 2" in text
    assert "the longest sequence takes 4 ranks" in text


def test_the_list_counts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--recipe", "list", "--plan"])
    assert capsys.readouterr().out.splitlines()[-1] == "4 recipes, 3 can be run today, 1 untested, 4 shrunk"
