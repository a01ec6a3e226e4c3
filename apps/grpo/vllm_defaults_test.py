"""vLLM's share of a GPU, from the plan; no GPU is asked."""

from pathlib import Path

import pytest
from transformers import Qwen3Config

from apps.grpo.main import configure
from apps.grpo.registry import spec_of
from apps.grpo.vllm_defaults import settled
from runplan.report.plan import make_plan

SIZES = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151_936}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
AHEAD = ("--schedule.mode", "one_step_off", "--objective.off-policy", "truncate", "--rollout.no-sleep")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of Qwen3-0.6B's shape."""
    Qwen3Config(**SIZES, **HEADS).save_pretrained(tmp_path)
    return tmp_path


def share_of(model: Path, *words: str) -> float:
    """Return vLLM's share; the plan has no problem with it."""
    config = settled(configure(["--recipe", "qwen3-0-6b-gsm8k", "--model", str(model), "--data", "rows.jsonl", *words]))
    if config.engine.device == "cuda":
        assert make_plan(spec_of(config)).problems == []
    return config.cluster.rollout.memory_share


def test_it_takes_what_training_leaves(model: Path) -> None:
    asleep, beside = share_of(model), share_of(model, *AHEAD)
    plain = share_of(model, *AHEAD, "--trainer.compile", "off")
    assert 0.7 < asleep < 0.9, "training's states alone are beside it"
    assert 0.5 < beside < 0.6, "a whole step is beside it"
    assert 0.05 < plain < asleep / 4, "layers that are not compiled keep twice as much"
    assert share_of(model, "--rollout.max-requests", "8") < asleep / 4, "as much as its requests need"
    copies = share_of(model, "--rollout.data-parallel", "4", "--rollout.copies-per-device", "4")
    assert 4 * copies < asleep, "each copy has a context of its own"


def test_what_is_chosen_stays(model: Path) -> None:
    assert share_of(model, "--rollout.gpu-memory-utilization", "0.5") == 0.5
    assert share_of(model, "--trainer.device", "cpu", "--rollout.no-sleep") == 0.0
    config = configure(["--recipe", "quickstart"])
    assert settled(config) is config
