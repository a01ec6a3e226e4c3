import os
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from seqpack.batches.packed import PackedBatch
from seqpack.testing import assert_packing_isolated, check_packing

# What a hybrid without fused kernels does with the boundaries that its kernels would need.
LEAKS_THOUGH_TOLD = {"5.17.0": True, "5.23.0": False, "5.24.0": False}

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2))


def qwen(kinds: list[str]) -> Qwen3_5ForCausalLM:
    torch.manual_seed(0)
    linear = {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    config = Qwen3_5TextConfig(**SIZES, **linear, head_dim=16, num_hidden_layers=len(kinds), layer_types=kinds)
    return Qwen3_5ForCausalLM(config)


def test_transformers_is_the_one_that_the_target_names() -> None:
    assert os.environ.get("TRANSFORMERS", transformers.__version__) == transformers.__version__


def test_full_attention_passes_with_positions_that_start_again() -> None:
    assert_packing_isolated(llama())


def test_full_attention_of_qwen_passes() -> None:
    assert_packing_isolated(qwen(["full_attention", "full_attention"]))


def test_stock_qwen_without_fused_kernels_leaks_through_its_linear_attention() -> None:
    report = check_packing(qwen(["full_attention", "linear_attention", "full_attention"]))
    assert not report.isolated
    assert not report.grads_equal
    assert report.moved
    assert report.origin is not None
    assert (report.origin.name, report.origin.kind) == ("model.layers.1.linear_attn", "Qwen3_5GatedDeltaNet")


def test_stock_qwen_told_the_boundaries_leaks_or_refuses() -> None:
    def packed(model: nn.Module, row: PackedBatch) -> torch.Tensor:
        cu, longest = row.cu_seqlens, row.max_seqlen
        number = torch.repeat_interleave(torch.arange(row.num_sequences, dtype=torch.int32), cu.diff().long())
        told = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": longest, "max_length_k": longest}
        ids, positions = row.values["input_ids"][None], row.position_ids[None]
        out = model(input_ids=ids, position_ids=positions, seq_idx=number[None], use_cache=False, **told)
        logits: torch.Tensor = out.logits
        return logits

    assert transformers.__version__ in LEAKS_THOUGH_TOLD, "run benchmarks/isolation_table.py and add this version"
    if not LEAKS_THOUGH_TOLD[transformers.__version__]:
        with pytest.raises(ValueError, match="keep packed sequences apart"):
            check_packing(qwen(["linear_attention"]), packed)
        return
    report = check_packing(qwen(["linear_attention"]), packed)
    assert report.moved
    assert report.origin is not None
    assert (report.origin.name, report.origin.kind) == ("model.layers.0.linear_attn", "Qwen3_5GatedDeltaNet")


@pytest.mark.parametrize(
    "flags",
    [{"use_cache": True}, {"use_cache": False, "attention_mask": True}, {"use_cache": False, "position_ids": None}],
)
def test_full_attention_leaks_with_other_flags(flags: dict[str, Any]) -> None:
    def packed(model: nn.Module, row: PackedBatch) -> torch.Tensor:
        ids = row.values["input_ids"][None]
        call = {"position_ids": row.position_ids[None], **flags}
        if call.get("attention_mask"):
            call["attention_mask"] = torch.ones_like(ids)
        logits: torch.Tensor = model(input_ids=ids, **call).logits
        return logits

    assert not check_packing(llama(), packed).isolated


def test_one_sequence_a_call_is_isolated_for_the_hybrid_too() -> None:
    def packed(model: nn.Module, row: PackedBatch) -> torch.Tensor:
        pieces = row.values["input_ids"].split(list(row.lengths))
        return torch.cat([model(input_ids=piece[None], use_cache=False).logits[0] for piece in pieces])

    assert_packing_isolated(qwen(["linear_attention", "full_attention"]), packed)
