"""What is left of modelling code names the config fields that a model reads, and no others."""

import re
from typing import Any

import pytest
from transformers import AutoConfig

from engines.prove.comparison import sequences, stock
from engines.prove.lengths import proof_lengths
from engines.prove.modeling_code import modeling_code
from engines.prove.proof import random_model, small_config
from engines.prove.small_config import VOCABULARY, thresholds


def code_of(config: Any) -> str:
    small = small_config(config)
    model, rows = random_model(small), sequences(proof_lengths(thresholds(small)), VOCABULARY)
    return modeling_code(model, stock(model, rows).gradients)


@pytest.mark.parametrize(
    ("kind", "read", "unread"),
    [
        ("exaone4", ("rms_norm_eps", "sliding_window"), "sliding_window_pattern"),  # stored, and never read again
        ("diffllama", ("rms_norm_eps",), "lambda_std_dev"),  # draws first values
        ("doge", ("rms_norm_eps",), "num_experts_per_tok"),  # of the router's loss alone
        ("mpt", ("layer_norm_epsilon",), "alibi_bias_max"),  # the default of an argument
    ],
)
def test_a_field_that_changes_no_number_is_not_named(kind: str, read: tuple[str, ...], unread: str) -> None:
    code = code_of(AutoConfig.for_model(kind))
    assert all(re.search(rf"config\.{name}\b", code) for name in read)
    assert not re.search(rf"(config\.|=){unread}\b|{unread}=", code)


def test_a_tower_of_images_is_left_out_of_the_code() -> None:
    """The vision part of MiniMax M3 alone has an activation by `hidden_act`."""
    code = code_of(AutoConfig.for_model("minimax_m3_vl"))
    assert "DecoderLayer" in code
    assert "VisionMLP" not in code
