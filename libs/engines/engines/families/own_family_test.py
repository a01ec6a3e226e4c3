"""A family of a user's, by FILE.py:NAME: its fields are checked, its model is proven before it is trained."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import Olmo2Config

from engines.config import EngineConfig
from engines.families import own_family
from engines.families.own_family import use_own_family
from engines.families.registry import family_of
from engines.loading import open_model
from engines.prove.certificate import cached_at
from engines.prove.generic_family import generic_family

SOURCE = """
from engines.families.family import Family
from engines.families.fields import ATTENTION

def olmo2(biases: bool = False):
    fields = {**ATTENTION, "attention_bias": (False, True) if biases else (False,)}
    return Family("olmo2", ("olmo2",), "Olmo2ForCausalLM", "Olmo2Attention", fields)

llama = Family("mine", ("llama",), "LlamaForCausalLM", "LlamaAttention", {})
number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    path = tmp_path / "own_families.py"
    path.write_text(SOURCE)
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path))
    yield str(path)
    own_family._OWN.clear()


def config_of(**options: object) -> Olmo2Config:
    """A tiny model of that type."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return Olmo2Config(vocab_size=64, num_key_value_heads=2, pad_token_id=0, **sizes, **options)


def test_it_is_what_a_proof_admits(file: str) -> None:
    config = config_of()
    before = cached_at(config)
    opened = open_model(EngineConfig(family=f"{file}:olmo2"), config)
    assert family_of(opened.config).name == "olmo2"
    assert generic_family(config).attention == "Olmo2Attention"
    assert cached_at(config) != before
    assert cached_at(config).is_file()


def test_a_field_that_it_does_not_handle_is_refused(file: str) -> None:
    with pytest.raises(ValueError, match="attention_bias"):
        open_model(EngineConfig(family=f"{file}:olmo2"), config_of(attention_bias=True))
    use_own_family(EngineConfig(family=f"{file}:olmo2", family_options=("biases=true",)))
    assert generic_family(config_of(attention_bias=True)).name == "olmo2"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", (), "model type 'llama' belongs to the family llama"),
        ("number", (), "is a int: an engines.families.family.Family is needed"),
        ("olmo2", ("bias=true",), "family_options: there is no option 'bias', did you mean biases?"),
        ("llama", ("a=1",), "is a Family, and no function"),
    ],
)
def test_what_cannot_be_used_is_refused(file: str, name: str, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        use_own_family(EngineConfig(family=f"{file}:{name}", family_options=options))
