"""A sampler of somebody else's is held to the trainer on the first batch: told, measured, recorded, or stopped."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.recipe import RECIPE
from engines.prove.certificate import Certificate
from runlog.proofs import read_untested
from schedules import SamplerMismatchError

MODULE = '''
import torch
from transformers import AutoModelForCausalLM

from rollout import NativeEngine
from schedules import SamplerBackend


class Right(SamplerBackend):
    """Sampler with a module of its own."""

    module_names = True
    bits = None

    def build(self, config, model, version):
        """Return an engine; of so many bits its weights are rounded."""
        module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        with torch.no_grad():
            for name, weight in module.named_parameters():
                if self.bits is not None and name.endswith("proj.weight"):
                    scale = weight.abs().amax(-1, keepdim=True) / (2 ** (self.bits - 1) - 1)
                    weight.copy_((weight / scale).round() * scale)
        engine = Named(module, version=version, seed=config.seed, admit="rounds")
        engine.numerics = {} if self.bits is None else {f"bits={self.bits}": "rounding"}
        return engine

    def dtype(self, config, model, engine):
        """Return what the module computes in."""
        return "float32"


class Named(NativeEngine):
    """Engine that says what changes its numbers."""

    numerics = {}


class Rounded(Right):
    """Sampler whose weights have eight bits, which it says are rounding alone."""

    bits = 8
'''


@pytest.fixture(scope="module")
def samplers(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("samplers") / "samplers.py"
    path.write_text(MODULE)
    return str(path)


def small(run_dir: Path, sampler: str, **changes: Any) -> GrpoConfig:
    config, cluster = RECIPE.config, RECIPE.config.cluster
    engine = replace(config.engine, **changes)
    layout = replace(cluster.rollout, engine=sampler)
    return replace(config, run_dir=run_dir, steps=1, engine=engine, cluster=replace(cluster, rollout=layout))


def certificate(run_dir: Path) -> Certificate:
    (path,) = (run_dir / "certificates").glob("sampler-*.json")
    return Certificate.load(path)


def first_row(run_dir: Path) -> dict[str, Any]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return rows[1]


def test_a_right_one_is_told_measured_and_recorded(
    samplers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(small(tmp_path, f"{samplers}:Right"), RECIPE)
    assert "(bound 0.001: float32)" in " ".join(capsys.readouterr().out.split())
    row, found = first_row(tmp_path), certificate(tmp_path)
    assert row["log_prob_difference"] == row["proof/sampler_difference"] == found.log_probs < 1e-5
    assert row["proof/sampler_bound"] == found.options["bound"] == 1e-3
    assert found.holds
    assert (found.subject, found.options["sampler"]) == ("sampler", f"{samplers}:Right")
    assert not read_untested(tmp_path)


def test_one_of_eight_bits_stops_the_run_with_the_setting_and_the_flag(samplers: str, tmp_path: Path) -> None:
    told = r"step 1: .* float32 with bits=8 explains 0.001.*leave out bits=8, or .*--allow-untested sampler"
    with pytest.raises(SamplerMismatchError, match=told):
        run(small(tmp_path, f"{samplers}:Rounded"), RECIPE)
    found = certificate(tmp_path)
    assert not found.holds
    assert found.log_probs > found.options["bound"]
    assert not list(tmp_path.glob("checkpoints/*"))


def test_accepted_by_name_it_runs_and_that_is_recorded(samplers: str, tmp_path: Path) -> None:
    run(small(tmp_path, f"{samplers}:Rounded", allow_untested=("sampler",)), RECIPE)
    found = certificate(tmp_path)
    assert found.holds
    assert 1e-3 < found.log_probs < found.options["bound"] == pytest.approx(1e-2)
    assert found.options["widened"]
    assert "bits=8" in read_untested(tmp_path)["sampler"]
