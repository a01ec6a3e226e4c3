"""A sampler in a wheel outside of this tree: it is planned, runs, is resumed and runs in small, by its name alone."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from zipfile import ZipFile

import pytest

from apps.common.cli import command_line as cli
from apps.common.run.run_dir import steps_done
from apps.common.testing.process_kills import redirect_output, run_in_child
from apps.grpo import main
from apps.grpo import run as run_module

NAME = "outside_sampler:Backend"
MODULE = '''
"""Sampler of somebody else's: the native engine over a module that transformers reads."""

import torch
from transformers import AutoModelForCausalLM

from rollout import NativeEngine
from runplan import Buffer, SamplerPlan
from schedules import SamplerBackend


class Plan(SamplerPlan):
    """Memory: the weights in float32, and a cache of a fixed size."""

    def buffers(self, shape, layout, width):
        """Return the weights, and the caches."""
        weights = 4.0 * shape.layers * shape.hidden**2
        return [Buffer("weights", device=weights, always=True), Buffer("caches", 3 * 2.0**30, 2.0**29, always=True)]

    def seen_here(self, spec):
        """Return the line on its package."""
        return [f"outside_sampler 1.0 for {spec.recipe}"]


class Backend(SamplerBackend):
    """Sampler in the process that trains, with weights of its own."""

    module_names = True

    def build(self, config, model, version):
        """Return an engine."""
        print(f"outside_sampler builds an engine of version {version}", flush=True)
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return NativeEngine(module, version=version, seed=config.seed, admit="rounds")

    def dtype(self, config, model, engine):
        """Return what the module computes in."""
        return "float32"

    def plan(self):
        """Return its memory."""
        return Plan()
'''
ABOUT = "outside_sampler-1.0.dist-info"
FILES = {
    "outside_sampler/__init__.py": MODULE,
    f"{ABOUT}/METADATA": "Metadata-Version: 2.1\nName: outside-sampler\nVersion: 1.0\n",
    f"{ABOUT}/WHEEL": "Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    f"{ABOUT}/RECORD": "".join(f"{name},,\n" for name in ("outside_sampler/__init__.py", f"{ABOUT}/METADATA")),
}
SMALL = (
    *("--warm-start.steps", "0", "--prompts-per-step", "2", "--group-size", "2", "--eval-prompts", "2"),
    *("--eval-every", "2", "--save-every", "1", "--sampling.max-new-tokens", "8", "--trainer.device", "cpu"),
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, which Python imports from as it is."""
    path = tmp_path_factory.mktemp("wheels") / "outside_sampler-1.0-py3-none-any.whl"
    with ZipFile(path, "w") as made:
        for name, text in FILES.items():
            made.writestr(name, text)
    return path


def begin(wheel: Path, words: Sequence[str], folder: Path) -> None:
    """The child: the app in a process that finds the wheel."""
    redirect_output(folder)
    sys.path.insert(0, str(wheel))
    cli.main(lambda: main.main([*words, "--rollout.engine", NAME]))


def app(wheel: Path, folder: Path, *words: str) -> str:
    """Run the app with the sampler of the wheel; return what it prints."""
    assert run_module  # imported before the child is forked
    status = run_in_child(begin, wheel, words, folder)
    assert status == 0, (folder / "stdout").read_text() + (folder / "stderr").read_text()
    return (folder / "stdout").read_text()


def test_the_quickstart_runs_with_it_and_is_resumed(wheel: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = app(wheel, tmp_path, "--recipe", "quickstart", "--run-dir", str(run), "--max-steps", "2", *SMALL)
    assert "outside_sampler builds an engine of version 0" in first
    assert "copy of the weights: it is a sampler of your own that keeps it so" in " ".join(first.split())
    assert steps_done(run, 3)[0] == 2
    again = app(
        wheel, tmp_path, "--recipe", "quickstart", "--run-dir", str(run), "--max-steps", "3", "--resume", *SMALL
    )
    assert re.findall(r"outside_sampler builds an engine of version (\d+)", again) == ["1"]
    assert steps_done(run, 4)[0] == 3


def test_its_memory_and_packages_are_in_the_plan(wheel: Path, tmp_path: Path) -> None:
    text = app(wheel, tmp_path, "--recipe", "qwen3-5-27b-fsdp2", "--plan")
    assert "outside_sampler 1.0 for qwen3-5-27b-fsdp2" in text
    assert re.search(r"Pool +weights of each sampler: \d+\.\d GiB on the device\n", text)
    assert "caches of each sampler: 3.0 GiB on the device and 0.5 GiB on the host" in text
    assert f"Rollout   {NAME}: tp 4" in text


def test_a_recipe_runs_in_small_with_it(wheel: Path, tmp_path: Path) -> None:
    text = app(wheel, tmp_path, "--recipe", "math", "--shrink", "--run-dir", str(tmp_path / "run"))
    assert "math, shrunk" in text
    assert f"flag   --rollout.engine  native -> {NAME}" in text
    assert "outside_sampler builds an engine" in text
