"""A model of one's own computes on the accelerator where there is one; a recipe's tiny model stays where it says."""

from typing import Any

import pytest

from apps.common.cli.command_line import CommandLine
from apps.grpo import main as grpo
from apps.grpo.registry import spec_of
from apps.sft import main as sft
from engines.devices import detect
from engines.loading import resolve_device
from runplan.checks.machine import seen_here
from runplan.report.plan import make_plan

GPU_RECIPES = ("cuda", "npu", "auto")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU, at the one place where it is looked for."""
    monkeypatch.setattr(type(detect._KINDS["cuda"]), "missing", lambda _: None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("line", [grpo.command_line(), sft.command_line()], ids=lambda line: line.prog)
def test_own_models_are_on_the_gpu_with_every_recipe(line: CommandLine[Any]) -> None:
    for name in line.recipes:
        device = line.parse(["--recipe", name, "--model", "m", "--data", "d.jsonl"]).engine.device
        assert device in GPU_RECIPES
        if device == "auto":
            assert detect.devices_of(device).kind == "cuda"
    assert line.parse(["--model", "m", "--data", "d.jsonl", "--trainer.device", "cpu"]).engine.device == "cpu"


@pytest.mark.usefixtures("gpu")
def test_a_recipe_of_a_tiny_model_stays_on_the_cpu_and_says_so() -> None:
    config = grpo.configure([])
    assert config.engine.device == "cpu"
    assert resolve_device(config.engine).type == "cpu"
    assert any("--trainer.device auto takes a GPU" in line for line in make_plan(spec_of(config)).sections["Ranks"])
    own = spec_of(grpo.configure(["--model", "m"]))
    assert any("on a GPU where there is one" in line for line in make_plan(own).sections["Ranks"])
    assert seen_here(own, {})[0] == "device auto: cuda"


def test_without_a_gpu_own_models_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(detect._KINDS["cuda"]), "missing", lambda _: "there is none")
    assert resolve_device(grpo.configure(["--recipe", "quickstart", "--model", "m"]).engine).type == "cpu"
    assert seen_here(spec_of(grpo.configure(["--model", "m"])), {})[0] == "device auto: cpu"
