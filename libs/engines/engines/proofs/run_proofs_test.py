"""A run's certificates are made once: by the first that asks, and anew where a run asks for it."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, SmolLM3Config

from engines.config import EngineConfig
from engines.proofs.run_proofs import certificates_of
from engines.prove import admission
from engines.prove.certificate import Certificate, cached_at

MODEL = SmolLM3Config(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, no_rope_layers=[1, 0], pad_token_id=0,
)  # fmt: skip
PROVEN = Certificate("smollm3", "x", "small", (1, 2), 0.0, 0.0, None, {"leak": 1.0}, (), (), 0.1, {})


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[PretrainedConfig]:
    """The configs that were proven, each without a proof's work."""
    made: list[PretrainedConfig] = []
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path))
    monkeypatch.setattr(admission, "_MADE", set())

    def prove(config: PretrainedConfig) -> Certificate:
        made.append(config)
        return PROVEN

    monkeypatch.setattr(admission, "prove", prove)
    return made


def test_a_certificate_is_made_once_and_anew_where_a_run_asks_for_it(
    proofs: list[PretrainedConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, always = EngineConfig(), EngineConfig(prove="always")
    assert [one.hash for one in certificates_of(config, MODEL, 1)] == [PROVEN.hash]
    assert certificates_of(config, MODEL, 1) == (PROVEN,)
    assert len(proofs) == 1
    assert certificates_of(always, MODEL, 1) == (PROVEN,)  # made by this process: it is new
    monkeypatch.setattr(admission, "_MADE", set())  # another start
    certificates_of(always, MODEL, 1)
    admission.make_certificate(MODEL, "always")  # the model is opened
    assert len(proofs) == 2
    monkeypatch.setattr(admission, "_MADE", set())
    monkeypatch.setattr(admission, "parent_process", lambda: "the run")  # a rank
    admission.make_certificate(MODEL, "always")
    assert len(proofs) == 2


def test_those_who_ask_at_the_same_time_make_one(proofs: list[PretrainedConfig]) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: certificates_of(EngineConfig(), MODEL, 1), range(4)))
    assert found == [(PROVEN,)] * 4
    assert len(proofs) == 1


def test_registered_families_are_proven_where_a_run_asks_for_it(proofs: list[PretrainedConfig]) -> None:
    model = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    assert certificates_of(EngineConfig(), model, 1) == ()
    assert certificates_of(EngineConfig(prove="off"), MODEL, 1) == ()
    assert not proofs
    assert certificates_of(EngineConfig(prove="always"), model, 1) == (PROVEN,)


def test_a_folder_that_can_not_be_written_is_told(
    proofs: list[PretrainedConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="name another folder by TESSERA_CERTIFICATES"):
        certificates_of(EngineConfig(), MODEL, 1)


def test_one_that_was_made_for_another_config_is_not_taken(proofs: list[PretrainedConfig]) -> None:
    certificates_of(EngineConfig(), MODEL, 1)
    other = SmolLM3Config(**{**MODEL.to_dict(), "rms_norm_eps": 1e-3})
    assert cached_at(other) != cached_at(MODEL)
    certificates_of(EngineConfig(), other, 1)
    assert len(proofs) == 2
