"""What proofs admit and refuse: registered families, types of transformers that none describes, thresholds."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Phi3Config

from engines import EngineConfig, build_engine
from engines.families.registry import FAMILIES, family_of
from engines.prove import proof
from engines.prove.admission import admitted_family, make_certificate
from engines.prove.certificate import Certificate, cached_at
from engines.prove.comparison import chosen_log_probs, sequences, stock
from engines.prove.generic_family import GenericFamily
from engines.prove.lengths import proof_lengths
from engines.prove.proof import prove, random_model, small_config
from engines.prove.sensitivity import of_absent_layers
from engines.prove.small_config import shrink_config, thresholds
from engines.testing.one_rank import one_rank  # noqa: F401  a group for every test
from engines.tiny import tiny_batch
from objectives import SFT

LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 50 for i in range(48)],
    "long_factor": [2.0 + i / 5 for i in range(48)],
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "certificates"))
    monkeypatch.setattr("engines.families.registry._ADMITTED", {})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No config field is changed: what the other parts of a proof say."""
    monkeypatch.setattr(proof, "flips", lambda *args: ())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.usefixtures("quick")
def test_registered_families_agree_with_their_certificates(family: Any) -> None:
    for kind in family.model_types:
        certificate = prove(AutoConfig.for_model(kind))
        assert certificate.holds, certificate


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "kind",
    [
        *("granite", "gemma2", "gpt_oss", "deepseek_v3", "phi3", "nanochat", "lfm3", "mamba2", "bamba"),
        *("deepseek_v32", "glm_moe_dsa"),  # keys that are chosen by a layer, or by one before it
        *("doge", "minimax", "falcon_h1", "recurrent_gemma"),
        *("apertus", "minicpm3", "gpt_bigcode"),  # buffers: scalars on disk, whole numbers that are not there
    ],
)
def test_types_that_no_family_describes_are_equal(kind: str) -> None:
    certificate = prove(AutoConfig.for_model(kind))
    assert certificate.holds, certificate


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("bert", r"it is no causal model: a later token moves an earlier log-prob by .* \(sdpa attention\)"),
        ("paligemma", r"it is no causal model: a later token .* \(sdpa attention\)"),  # its eager attention is causal
        ("inkling_text", r"packed attention does not take position_bias \(from InklingAttention\)"),
        ("modernbert-decoder", "packed rows differ from stock transformers: log-probs"),
        ("zaya", "4 of 8 layers mixed tokens through the packed context"),
        ("rwkv", "0 of 4 layers mixed tokens through the packed context"),
        ("openai-gpt", "no layers that are known to mix tokens"),
    ],
)
def test_what_is_not_equal_is_refused_with_the_number_or_the_operation(kind: str, problem: str) -> None:
    certificate = prove(AutoConfig.for_model(kind))
    assert not certificate.holds
    assert re.search(problem, str(certificate))


@pytest.mark.parametrize("kind", ["nemotron", "dbrx", "qwen4_exp_text"])
def test_a_config_that_stock_transformers_cannot_run_in_small_is_refused_in_words(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"'{kind}' is not supported: no proof could be made, as stock transformers"):
        admitted_family(AutoConfig.for_model(kind))


def test_a_certificate_is_void_where_the_code_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("granite")
    before = cached_at(config)
    monkeypatch.setattr("engines.prove.certificate._code", lambda: "other")
    assert cached_at(config) != before


@pytest.mark.usefixtures("quick")
def test_a_rotary_embedding_that_switches_at_a_length_is_computed_for_each_sequence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one table for all of a row it is right at lengths 30, 5 and 17, and wrong at 4,200 beside 100."""
    config = Phi3Config(rope_parameters=LONG_ROPE, original_max_position_embeddings=4096)
    crossed = {"original_max_position_embeddings": 16, "max_position_embeddings": 24}
    assert thresholds(small_config(config)) == crossed
    certificate = prove(config)
    assert {15, 16, 17, 33} <= set(certificate.lengths)
    assert certificate.holds, certificate
    assert not certificate.admits("padded")  # stock rows of a call have one table
    monkeypatch.setattr("engines.prove.admission.prove", lambda part: certificate)
    with pytest.raises(ValueError, match=r"padded rows differ, packed rows are equal \(--trainer.batching packed\)"):
        admitted_family(config, batching="padded")
    monkeypatch.setattr("seqpack.adapters.mixers.by_length", lambda model: [])
    assert prove(config).log_probs > 0.1


def test_each_changed_field_moves_a_log_prob_a_hundred_tolerances() -> None:
    """Gemma's gets there by another value of its epsilon than the first that is tried."""
    certificate = prove(AutoConfig.for_model("gemma"))
    moved = {name: value for name, value in certificate.sensitivity.items() if name.startswith("config field")}
    assert "config field rms_norm_eps" in moved
    assert min(moved.values()) > proof.MARGIN * proof.LOG_PROBS
    assert (certificate.padded or 0.0) <= proof.LOG_PROBS


def test_a_field_is_changed_to_a_value_that_the_model_can_have() -> None:
    """No more of a head is rotated than it has: half as much again, the first value that is tried, is none."""
    certificate = prove(AutoConfig.for_model("phi3"))
    moved = certificate.sensitivity["config field rope_parameters.partial_rotary_factor"]
    assert moved > proof.MARGIN * proof.LOG_PROBS
    assert certificate.place["device"] == "cpu"


def test_fields_of_layers_that_a_model_lacks_are_not_asked_for() -> None:
    assert not prove(AutoConfig.for_model("smollm3")).not_exercised  # none of its layers has a window
    kinds = ["full_attention", "sliding_attention"]
    rope = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in kinds}
    names = ("sliding_window", "rope_parameters.sliding_attention.rope_theta", "rope_theta")
    for layers, absent in ((kinds[:1], [True, True, False]), (kinds, [False] * 3)):
        config = AutoConfig.for_model("laguna", num_hidden_layers=4, layer_types=(layers * 4)[:4], rope_parameters=rope)
        assert [of_absent_layers(config, name) for name in names] == absent
    assert not of_absent_layers(AutoConfig.for_model("mistral"), "sliding_window")  # all of its layers have one


def test_a_field_that_only_draws_first_values_is_not_asked_for() -> None:
    """Mamba's code names `time_step_floor` where it draws weights, and calls a method `expand`."""
    assert not prove(AutoConfig.for_model("mamba")).not_exercised


@pytest.mark.usefixtures("quick")
def test_a_rotary_embedding_that_depends_on_earlier_calls_is_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not prove(AutoConfig.for_model("llama", rope_parameters=rope)).admits("packed")


def test_lengths_are_on_both_sides_of_every_threshold() -> None:
    lengths = proof_lengths({"sliding_window": 8, "index_topk": 6})
    assert {1, 5, 6, 7, 8, 9, 13, 17, 33} <= set(lengths)
    assert len(set(lengths)) == len(lengths)


def test_no_part_of_a_model_stays_unreached() -> None:
    """DeepSeek-V4 compresses 128 tokens to a key: at shorter lengths nothing would be compared of that."""
    small = shrink_config(AutoConfig.for_model("deepseek_v4")).config
    assert small.compress_rates == {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    assert {3, 4, 5, 8, 9, 17} <= {*proof_lengths(thresholds(small))}
    assert thresholds(small)["index_topk"] == 24  # it chooses 6 keys of 4 tokens each
    model: Any = random_model(small_config(AutoConfig.for_model("granite")))
    rows = sequences((7, 12), 64)
    assert not proof._unreached(model, rows, stock(model, rows))
    model.model.image_embed = torch.nn.Linear(2, 2)  # of another kind of input: its config fields need a name
    model.model.reader = type("GateOfCrossAttention", (torch.nn.Linear,), {})(2, 2)
    assert not proof._unreached(model, rows, stock(model, rows))
    model.model.lost = torch.nn.Linear(2, 2)
    assert "reaches model.lost.weight: nothing was compared" in proof._unreached(model, rows, stock(model, rows))


def test_a_small_config_keeps_every_switch_and_a_layer_of_each_kind() -> None:
    config = AutoConfig.for_model("qwen3_5_text", attention_bias=True, tie_word_embeddings=True)
    small = shrink_config(config)
    assert set(small.config.layer_types) == set(config.layer_types)
    assert small.config.attention_bias
    assert small.config.tie_word_embeddings
    assert small.config.hidden_size < config.hidden_size
    assert ("hidden_size", config.hidden_size, small.config.hidden_size) in small.changes


def test_fields_that_nothing_exercised_need_their_names() -> None:
    """Falcon with one head of keys, as by default, has no use for `num_kv_heads`."""
    config = AutoConfig.for_model("falcon")
    certificate = make_certificate(config)
    assert certificate.holds
    assert certificate.not_exercised == ("num_kv_heads",)
    with pytest.raises(ValueError, match=r"exercised num_kv_heads.*allow_untested="):
        admitted_family(config)
    assert isinstance(admitted_family(config, untested=certificate.not_exercised), GenericFamily)
    assert isinstance(family_of(config), GenericFamily)


def test_a_certificate_is_made_once_for_a_config_and_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model("granite", num_hidden_layers=2)
    first = make_certificate(config)
    assert Certificate.load(cached_at(config)) == first
    monkeypatch.setattr("engines.prove.admission.prove", lambda text: pytest.fail("proven again"))
    assert make_certificate(config) == first
    assert cached_at(AutoConfig.for_model("granite", num_hidden_layers=2, logits_scaling=2.0)) != cached_at(config)
    with pytest.raises(ValueError, match="model family 'granite' is not supported"):
        admitted_family(config, "off")


@pytest.mark.parametrize("kind", ["zaya", "rwkv", "bart"])
def test_where_packed_rows_differ_padded_ones_are_trained(kind: str) -> None:
    torch.manual_seed(0)
    config = small_config(AutoConfig.for_model(kind))
    settings: dict[str, Any] = {"device": "cpu", "max_tokens_per_rank": 48, "master_dtype": "float32"}
    settings["allow_untested"] = make_certificate(config).not_exercised
    with pytest.raises(ValueError, match=r"packed rows .*padded rows are equal \(--trainer.batching padded\)"):
        build_engine(EngineConfig(**settings), config)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    batch = tiny_batch([7, 3, 12, 5])
    with torch.no_grad():
        want = [chosen_log_probs(model, ids) for ids in batch["input_ids"].unbind()]
    engine = build_engine(EngineConfig(batching="padded", **settings), model)
    for ours, theirs in zip(engine.forward(batch)["log_probs"].unbind(), want, strict=True):
        torch.testing.assert_close(ours[1:], theirs, atol=1e-5, rtol=0)
    losses = [engine.train_batch(batch, SFT())["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    with pytest.raises(ValueError, match="set batching='padded'"):
        build_engine(EngineConfig(**settings), model)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", ["smollm3", "cohere2", "glm4_moe", "llama4_text", "phi", "mamba2"])
def test_a_proven_model_is_trained_exported_and_read_by_stock_transformers(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(small_config(AutoConfig.for_model(kind))).save_pretrained(tmp_path / "model")
    settings = {"device": "cpu", "lr": 1e-3, "max_tokens_per_rank": 24}
    engine = build_engine(EngineConfig(model=str(tmp_path / "model"), **settings))  # type: ignore[arg-type]
    batch = tiny_batch([7, 3, 12, 5])
    losses = [engine.train_batch(batch, SFT())["loss"] for _ in range(3)]
    assert losses == sorted(losses, reverse=True)
    engine.save_hf(str(tmp_path / "export"))
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    for ids, ours in zip(batch["input_ids"].unbind(), engine.forward(batch)["log_probs"].unbind(), strict=True):
        table = torch.log_softmax(stock(input_ids=ids[None]).logits[0].float(), -1)
        assert torch.allclose(ours[1:], table[:-1].gather(1, ids[1:, None])[:, 0], atol=1e-5)
