"""A sampler's memory beside training, from the plan; no GPU is asked."""

from pathlib import Path

import pytest
from transformers import Qwen3_5TextConfig, Qwen3Config

from apps.grpo.config import GrpoConfig
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


LONG = ("--prompts-per-step", "32", "--group-size", "8", "--max-episode-tokens", "4096")


def native(model: Path, *words: str) -> GrpoConfig:
    """The settings of a run of the native sampler, as it begins."""
    return settled(configure(["--model", str(model), "--data", "rows.jsonl", *words]))


def caches_of(config: GrpoConfig) -> str:
    """The plan's line on the native sampler's caches; the plan has no problem with them."""
    plan = make_plan(spec_of(config))
    assert not any("caches" in problem for problem in plan.problems)
    return next(line for line in plan.sections["Kept"] if line.startswith("sampler caches"))


def test_caches_of_the_native_sampler_take_what_training_leaves(model: Path) -> None:
    cuda = (*LONG, "--trainer.device", "cuda", "--pools.device-memory-gib")
    large, small = native(model, *cuda, "80"), native(model, *cuda, "40")
    most, less = large.cluster.rollout.kv_cache_memory_gib, small.cluster.rollout.kv_cache_memory_gib
    assert most is not None
    assert less is not None
    assert 50 < most < 80 - 9, "training's states are beside it"
    assert 35 < most - less < 45
    assert f"{most:.1f} GiB" in caches_of(large)
    assert native(model, *cuda, "2000").cluster.rollout.kv_cache_memory_gib is None, "all requests have room"
    ahead = native(model, *cuda, "80", *AHEAD[:-1]).cluster.rollout.kv_cache_memory_gib
    assert ahead is not None
    assert ahead < most, "a whole step is beside it"


def test_a_bound_of_the_caches_that_is_chosen_stays_and_is_held_to_one_request(model: Path) -> None:
    cpu = (*LONG, "--trainer.device", "cpu")
    chosen = native(model, *cpu, "--rollout.kv-cache-memory-gib", "3")
    assert chosen.cluster.rollout.kv_cache_memory_gib == 3
    assert "3.0 GiB" in caches_of(chosen)
    tight = make_plan(spec_of(native(model, *cpu, "--rollout.kv-cache-memory-gib", "1")))
    assert any("a request of 4096 tokens needs 1.8 GiB of the native sampler's caches" in p for p in tight.problems)
    tiny = native(model, *cpu, "--pools.device-memory-gib", "1")
    assert caches_of(tiny), "one request always has room by default"


def test_vllm_by_a_flag_sleeps_and_keeps_prompts(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def on(directory: Path, *words: str) -> tuple[bool, bool]:
        argv = ["--model", str(directory), "--data", "rows.jsonl", "--rollout.engine", "vllm", *words]
        layout = configure(argv).cluster.rollout
        return layout.sleep, layout.prefix_cache

    cuda = ("--trainer.device", "cuda")
    assert on(model, *cuda) == (True, True)
    assert "turns on --rollout.prefix-cache and --rollout.sleep on a GPU (off: --rollout.no-" in capsys.readouterr().err
    assert on(model, *cuda, "--rollout.no-sleep", "--rollout.no-prefix-cache") == (False, False)
    assert on(model, *cuda, *AHEAD[:-1]) == (False, True), "training waits for nobody"
    assert on(model, "--trainer.device", "cpu") == on(model, *cuda, "--rollout.device", "cpu") == (False, False)
    Qwen3_5TextConfig(**SIZES).save_pretrained(tmp_path / "hybrid")
    assert on(tmp_path / "hybrid", *cuda) == (True, False)
