"""Published configs, each proven in small: equal, or refused with the number or the missing operation."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from engines.families.registry import FAMILIES, family_of
from engines.families.unread_fields import unread_fields
from engines.proofs import published_configs
from engines.proofs.published_configs import PUBLISHED, Published, measure
from engines.prove import proof
from engines.prove.certificate import Certificate
from engines.prove.sensitivity import _named
from engines.prove.small_config import shrink_config, thresholds


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.name)
def test_its_verdict(published: Published, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "flips", lambda *args: ())  # the long tier changes every field
    certificate = proof.prove(published.config())
    if published.refused is None:
        assert certificate.holds, certificate
        assert all(moved > proof.MARGIN * proof.LOG_PROBS for moved in certificate.sensitivity.values())
    else:
        assert not certificate.holds
        assert re.search(published.refused, str(certificate)), certificate


def test_figures_have_each_config_and_a_proof_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problem: list[str] = []
    made = Certificate("x", "x", "small", (1,), 2e-7, 3e-6, 0.0, {}, ("rope_theta",), (), 0.1, {})
    monkeypatch.setattr(published_configs, "prove", lambda config: replace(made, problems=tuple(problem)))
    (tmp_path / "benchmarks").mkdir()
    assert measure(tmp_path, (), "2000-01-01") == 0
    values = json.loads((tmp_path / "benchmarks" / "published_configs.json").read_text())["runs"][0]["values"]
    assert [*values] == [one.name for one in PUBLISHED]
    assert values["openai/gpt-oss-20b"]["log-probs"] == "2e-07"
    problem.append("packed rows differ")
    assert measure(tmp_path, ["SmolLM3"], "2000-01-01") == 1
    assert '"verdict": "packed rows differ"' in capsys.readouterr().out.splitlines()[-1]


def test_types_with_a_family_are_admitted_by_it() -> None:
    described = [one for one in PUBLISHED if any(one.model_type in family.model_types for family in FAMILIES)]
    assert {one.name for one in described} >= {"Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B", "google/gemma-3-27b-it"}
    for one in described:
        assert family_of(one.config()).name.removesuffix("_text") in one.model_type


def test_every_kind_of_layer_is_kept_in_small() -> None:
    """Layers with experts, with sizes of their own, and without rotary embeddings, by their places in what is left."""
    by_name = {one.name: shrink_config(one.config()).config for one in PUBLISHED}
    maverick = by_name["meta-llama/Llama-4-Maverick-17B-128E-Instruct"]
    assert 0 < len(maverick.moe_layers) < maverick.num_hidden_layers < 8
    assert set(maverick.no_rope_layers) == {0, 1}
    assert {"floor_scale", "attention_chunk_size"} <= thresholds(maverick).keys()
    gemma = by_name["google/gemma-4-26B-A4B"]
    own = {int(layer) for layer in gemma.to_dict()["per_layer_config"]}
    assert own == {place for place, kind in enumerate(gemma.layer_types) if kind == "full_attention"}
    assert gemma.top_k_experts < gemma.num_experts


def test_a_field_is_read_by_any_of_its_names() -> None:
    """Kimi-Linear's checkpoint names what modelling code reads as num_experts_per_tok, and lists its layers apart."""
    config = next(one for one in PUBLISHED if one.model_type == "kimi_linear").config()
    assert unread_fields(config, ["num_experts_per_token", "num_expert_group", "linear_attn_config"]) == (
        "linear_attn_config",
    )
    source = "config.num_experts_per_tok, config.head_dim, config.hidden_size"
    assert _named(config, "num_experts_per_token", source)
    assert not _named(config, "linear_attn_config.head_dim", source)
    assert not _named(config, "num_expert_group", source)
