"""The supervised scripts from end to end on four CPU processes, with tiny models of their architectures: by hand."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig

from apps.common.shrink.fields import ProcessLimit
from apps.common.testing.weight_delta import assert_trained, load_tensors
from apps.sft.main import run_shrunk
from apps.sft.registry import recipes

RECIPES = recipes()


EXPERT = re.compile(r"(.*\.experts)\.\d+\.")


def chosen(run_dir: Path) -> str:
    """What matches all tensors but a tower that no text trains, and routed experts that stood still whole.

    The router of a tiny random model may send no token of a short run to an expert, on any backend; others of its layer
    must have moved.
    """
    before, after = load_tensors(run_dir / "model"), load_tensors(run_dir / "export")
    experts = {match[0]: match[1] for name in before if (match := EXPERT.match(name))}
    moved = {name for name, value in before.items() if not value.equal(after[name])}
    still = {one: layer for one, layer in experts.items() if not any(name.startswith(one) for name in moved)}
    for layer in still.values():
        assert any(at == layer for one, at in experts.items() if one not in still), layer
    return "^" + "".join(f"(?!{re.escape(one)})" for one in ["model.visual.", *still])


@pytest.mark.parametrize("name", ["qwen3-5-397b-a17b-megatron", "qwen3-30b-a3b-dynamic-cp"])
def test_a_recipe_runs_from_end_to_end(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RECIPES[name].config
    owned = config.cluster.env
    for entry in owned:  # as the command starts itself again with them
        monkeypatch.setenv(*entry.split("="))
    result = run_shrunk(replace(config, run_dir=tmp_path / "run"), ProcessLimit(4))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.steps == len(rows) - 1 == 4
    assert result.loss_after < result.loss_before
    assert_trained(tmp_path / "run", only=chosen(tmp_path / "run"))
    assert "--trainer.device  cuda -> cpu" in capsys.readouterr().out
    trained = AutoConfig.from_pretrained(tmp_path / "run" / "export").get_text_config()
    origin = RECIPES[name].origin
    assert origin is not None
    assert origin.shape is not None
    assert trained.model_type == origin.shape.model_type
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert written["cluster"]["environment"] == list(owned)
    assert written["engine"]["backend"] == config.engine.backend == "megatron"
    assert written["engine"]["context_parallel"] == config.engine.context_parallel
