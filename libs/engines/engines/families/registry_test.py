"""What is not registered, and fields and values that no test has run, are refused before weights are loaded."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

from engines import EngineConfig
from engines.families.gemma3 import GEMMA3
from engines.families.registry import FAMILIES, family_of, register_family
from engines.loading import load_model
from engines.prove.admission import admitted_family
from engines.scoring.packed_model import adapt_for_packing
from engines.tiny import tiny_config, tiny_model

TYPES = [kind for family in FAMILIES for kind in family.model_types]
REFUSED = {
    "inkling_text": "does not take position_bias",
    "zaya": "layers mixed tokens through the packed context",
    "openai-gpt": "no layers that are known to mix tokens",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_proof_refutes_is_refused_before_weights_are_loaded(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "certificates"))
    AutoConfig.for_model(kind).save_pretrained(tmp_path)  # a config.json alone: no weight could be loaded
    with pytest.raises(ValueError, match=rf"proof of {kind} .*{REFUSED[kind]}"):
        load_model(EngineConfig(model=str(tmp_path)))
    with pytest.raises(ValueError, match=f"'{kind}' is not supported"):
        load_model(EngineConfig(model=str(tmp_path), prove="off"))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("quantization_config", {"quant_method": "fp8"}, "not plain numbers"),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "packed rows differ"),
    ],
)
def test_fields_that_no_proof_can_admit(
    field: str, value: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "certificates"))
    config = AutoConfig.for_model("llama")
    setattr(config, field, value)
    with pytest.raises(ValueError, match=words):
        admitted_family(config)


def test_the_refusal_says_what_to_write() -> None:
    with pytest.raises(
        ValueError, match=r"engines/families/phi\.py.*registry\.py.*cases\.py.*python -m engines families"
    ):
        family_of(AutoConfig.for_model("phi"))


@pytest.mark.parametrize("kind", TYPES)
def test_every_field_of_the_stock_config_has_a_rule(kind: str) -> None:
    """A transformers release that adds a field fails here first."""
    family_of(AutoConfig.for_model(kind))


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("qwen3_next", {"use_sliding_window": False}), ("gemma3_text", {"cache_implementation": "hybrid"})],
)
def test_fields_that_only_published_checkpoints_have_are_known(kind: str, fields: dict[str, Any]) -> None:
    family_of(AutoConfig.for_model(kind, **fields))


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.06),
        ("logits_scaling", 8.0),
        ("residual_multiplier", 0.2),
        ("embedding_multiplier", 12.0),
        ("attention_multiplier", 0.1),
        ("use_qk_norm", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "a_new_key": 1}),
    ],
)
def test_fields_that_change_the_result_are_refused_by_name(
    kind: str, field: str, value: bool | dict[str, Any] | float
) -> None:
    config = AutoConfig.for_model(kind)
    setattr(config, field, value)
    with pytest.raises(
        ValueError, match=field if field != "rope_parameters" else "rope (type 'dynamic'|parameter a_new_key)"
    ):
        family_of(config)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("is_llama_config", True),
        ("unsloth_version", "2025.3.19"),
        ("_attn_implementation_autoset", True),
        ("finetuning_task", "x"),
        ("auto_map", {"AutoModelForCausalLM": "modeling.Other"}),
        ("rope_interleaved", False),
        ("a_field_of_tomorrow", 1),
    ],
)
def test_fields_that_no_modelling_code_reads_are_ignored(kind: str, field: str, value: Any) -> None:
    config = AutoConfig.for_model(kind)
    setattr(config, field, value)
    assert family_of(config).unread(config) == (field,)
    config.transformers_version = "99.0"  # its modelling code may read a field that is not known to be a note
    if field in ("rope_interleaved", "a_field_of_tomorrow"):
        with pytest.raises(ValueError, match=field):
            family_of(config)
    else:
        assert family_of(config).unread(config) == (field,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gradient_checkpointing", True),
        ("temperature", 0.7),
        ("max_length", 20),
    ],
)
def test_fields_that_are_not_of_the_model_are_ignored(field: str, value: Any) -> None:
    config = AutoConfig.for_model("llama")
    setattr(config, field, value)
    assert family_of(config).unread(config) == ()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"use_mrope": True}, "use_mrope"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3_5_text", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("llama", {"layer_types": ["chunked_attention"]}, "chunked_attention"),
        ("mistral", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_5_text", {"layer_types": ["sliding_attention"]}, "sliding_attention"),
    ],
)
def test_values_that_no_case_has_run_are_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    config = AutoConfig.for_model(kind)
    for name, value in changes.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=words):
        family_of(config)


def test_a_field_that_is_unset_is_no_reason() -> None:
    config = tiny_config("attention")
    config.final_logit_softcapping = None
    assert family_of(config).name == "qwen3"


def test_two_families_cannot_have_one_model_type() -> None:
    before = list(FAMILIES)
    with pytest.raises(ValueError, match="'llama' belongs to the family llama"):
        register_family(dataclasses.replace(FAMILIES[0], model_types=("another", "llama"), wrappers=()))
    assert before == FAMILIES


def test_vision_language_configs_are_their_text_part() -> None:
    assert family_of(AutoConfig.for_model("qwen3_5")).name == "qwen3_5"
    assert family_of(AutoConfig.for_model("qwen3_5_moe")).name == "qwen3_5_moe"
    assert family_of(AutoConfig.for_model("gemma3")).name == "gemma3"
    with pytest.raises(ValueError, match="'gemma3' sees no images here: leave vision at 'off'"):
        GEMMA3.check_vision(AutoConfig.for_model("gemma3"))


def test_modules_that_are_not_what_their_config_says() -> None:
    config = tiny_config("attention")
    with pytest.raises(ValueError, match="Qwen3ForSequenceClassification"):
        adapt_for_packing(transformers.Qwen3ForSequenceClassification(config))
    model: Any = tiny_model("attention")
    model.lm_head = torch.nn.Linear(32, 48, bias=True)
    with pytest.raises(ValueError, match="without bias"):
        adapt_for_packing(model)
    model = tiny_model("attention")
    model.model.layers[1].register_buffer("e_score_correction_bias", torch.zeros(3))
    with pytest.raises(ValueError, match=r"buffer model\.layers\.1\.e_score_correction_bias"):
        adapt_for_packing(model)
    model = tiny_model("attention")
    model.model.layers[1].self_attn = torch.nn.Identity()
    with pytest.raises(ValueError, match="exactly one known module"):
        adapt_for_packing(model)
