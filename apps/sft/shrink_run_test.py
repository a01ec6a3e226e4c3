"""The supervised scripts from end to end on four CPU processes, with tiny models of their architectures: by hand."""

import json
from dataclasses import replace

import pytest
from transformers import AutoConfig

from apps.common.trained import assert_trained
from apps.sft.main import run_shrunk
from apps.sft.registry import recipes

RECIPES = recipes()


@pytest.mark.parametrize("name", ["qwen3-5-397b-a17b-megatron", "qwen3-30b-a3b-dynamic-cp"])
def test_a_recipe_runs_from_end_to_end(name, tmp_path, capsys):
    config = RECIPES[name].config
    result = run_shrunk(replace(config, run_dir=tmp_path / "run"), 4)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.steps == len(rows) - 1 == 4
    assert result.loss_after < result.loss_before
    assert_trained(tmp_path / "run")
    assert "--engine.device  cuda -> cpu" in capsys.readouterr().out
    trained = AutoConfig.from_pretrained(tmp_path / "run" / "export").get_text_config()
    assert trained.model_type == RECIPES[name].origin.shape.model_type
    assert list((tmp_path / "run" / "checkpoints").iterdir())
