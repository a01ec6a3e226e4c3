"""megatron-core's own PackedSeqParams takes a row's fields, and its functions read them as the row is laid out."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from seqpack.adapters import PackedCollator, packed_seq_arguments

SAMPLES = [{"input_ids": list(range(1, n + 1))} for n in (3, 8, 1, 5)]
ONE_RANK = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
CONFIG = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)


def test_the_class_has_every_field() -> None:
    given = packed_seq_arguments(PackedCollator().pack(SAMPLES))
    params = PackedSeqParams(**given)
    assert {field.name for field in fields(params)} > set(given)
    assert all(getattr(params, name) is value for name, value in given.items())


@pytest.mark.parametrize("layout", [{}, {"align": 4}, {"align": 4, "bucket": 48}])
def test_megatron_turns_each_sequence_from_its_own_beginning(layout: dict[str, Any]) -> None:
    """Its rotary embedding of a packed row, called as its SelfAttention does, is that of each sequence alone."""
    packed = PackedCollator(**layout).pack(SAMPLES)
    params = PackedSeqParams(**packed_seq_arguments(packed))
    torch.manual_seed(0)
    rows, frequencies = torch.randn(packed.num_tokens, 2, 8), torch.randn(params.max_seqlen_q, 1, 1, 8)
    bounds = params.cu_seqlens_q_padded
    turned = apply_rotary_pos_emb(rows, frequencies, CONFIG, cu_seqlens=bounds, cp_group=ONE_RANK)
    true = (params.cu_seqlens_q[1:] - params.cu_seqlens_q[:-1]).tolist()
    assert true[: len(SAMPLES)] == [len(sample["input_ids"]) for sample in SAMPLES]
    for length, start in zip(true, bounds.tolist(), strict=False):
        alone = rows[start : start + length, None]  # [s, 1, h, d]
        want = apply_rotary_pos_emb(alone, frequencies[:length], CONFIG, cp_group=ONE_RANK)
        torch.testing.assert_close(turned[start : start + length], want[:, 0])
