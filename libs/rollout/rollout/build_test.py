"""Configurations are checked when they are made, and what is built is what was asked for."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollout.build import build_rollout
from rollout.capability import BACKENDS, NATIVE, supports
from rollout.config import RolloutConfig
from rollout.engine import RolloutEngine, Sampling
from rollout.native.engine import NativeEngine
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model
from seqpack.capability import Unsupported

BAD: dict[str, list[Any]] = {
    "backend": ["Native", "", None],
    "max_batch": [0, -1, 1.5, True, None],
    "max_length": [0, 2.0, False],
    "prefill_tokens": [0, None, "16"],
    "compact_below": [-0.1, 1.1, float("nan")],
    "decoder": ["fast", None],
    "on_commit": ["", "drop"],
    "admit": ["", "drop"],
    "keep_tokens": [-1, 0.5, True, None],
    "kv_cache_memory_bytes": [0, -1, 1.5, True],
    "routed_experts": [None, 1, "yes"],
    "tokenizer": ["folder", 3],
    "seed": [None, 0.5, True],
    "vllm": [None, {}],
    "openai": [None, {}],
}


def test_every_setting_refuses_what_it_cannot_be() -> None:
    assert set(BAD) == {field.name for field in fields(RolloutConfig)}
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                RolloutConfig(**{name: value})


def test_the_engine_has_its_settings() -> None:
    model = tiny_model(48)
    engine = build_rollout(RolloutConfig(max_length=20, max_batch=2, decoder="module", seed=5), model, version=3)
    assert isinstance(engine, RolloutEngine)
    assert isinstance(engine, NativeEngine)
    assert engine.version == 3
    with pytest.raises(ValueError, match="max_length=20"):
        engine.generate_batch([[3] * 18], Sampling(max_new_tokens=3))
    prompts = [[3, 4], [5, 6, 7], [8]]
    done = engine.generate_batch(prompts, Sampling(max_new_tokens=4))
    alike, unlike = (build_rollout(RolloutConfig(seed=seed), model) for seed in (5, 6))
    assert isinstance(alike, NativeEngine)
    assert isinstance(unlike, NativeEngine)
    again = alike.generate_batch(prompts, Sampling(max_new_tokens=4))
    other = unlike.generate_batch(prompts, Sampling(max_new_tokens=4))
    assert [c.ids for c in done] == [c.ids for c in again]
    assert [c.ids for c in done] != [c.ids for c in other]


def test_what_is_not_there_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="hand build_rollout no model"):
        build_rollout(RolloutConfig(backend="openai"), tiny_model(48))
    assert supports(RolloutConfig(backend="openai"), "cancel")
    assert not supports(RolloutConfig(backend="openai"), "two_phase_weights")
    with pytest.raises(ValueError, match="hand build_rollout its model"):
        build_rollout(RolloutConfig())


def test_vllm_is_refused_a_module() -> None:
    pytest.importorskip("rollout.vllm")
    assert supports(RolloutConfig(backend="vllm"), "cancel")
    with pytest.raises(ValueError, match="reads a model's directory"):
        build_rollout(RolloutConfig(backend="vllm"), tiny_model(48))


def test_features_are_answered_before_anything_is_built(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    config = RolloutConfig(tokenizer=tmp_path)
    engine, plain = build_rollout(config, tiny_model(300)), build_rollout(RolloutConfig(), tiny_model(300))
    for feature, answer in NATIVE.items():
        assert supports(config, feature) == answer == engine.supports(feature)
        told = supports(RolloutConfig(), feature)
        assert told == plain.supports(feature)
        assert told == answer or (feature == "structured_outputs" and not told)
    assert all(len(a.reason) > 20 for a in (BACKENDS["native"], BACKENDS["openai"]) if isinstance(a, Unsupported))
    with pytest.raises(ValueError, match="known are"):
        supports(RolloutConfig(), "teleport")
