"""Layers that hand no keywords down, or mix tokens by code of their own: packed and recomputed as stock alone."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engines.families.registry import admitted
from engines.prove.comparison import largest, packed_layers, sequences
from engines.prove.generic_family import generic_family
from engines.prove.proof import random_model, small_config
from engines.scoring.packed_model import packed_logits
from seqpack.adapters.context import ContextMask, PackedContext, carried
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import pack_sequences

LENGTHS = (7, 12, 1, 19, 2)


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every logit weighs differently."""
    model.zero_grad()
    (logits * torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["stablelm", "bloom", "mpt", "falcon", "gptj", "codegen", "gpt_neo", "mamba", "jamba"])
def test_recomputed_layers_find_the_context_of_their_own_pass(kind: str) -> None:
    """Another row of as many tokens is scored between the forward and the backward pass."""
    config = small_config(AutoConfig.for_model(kind))
    model: Any = random_model(config)
    rows, others = sequences(LENGTHS, 64), sequences(LENGTHS[::-1], 64, seed=1)
    row, other = (pack_sequences(make_batch([{"input_ids": ids} for ids in part])) for part in (rows, others))
    for part in model.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0
    want = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in rows])
    want_gradients = gradients(model, want)
    with admitted(config, generic_family(config)), packed_layers(model):
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        got = packed_logits(model, row)
        with torch.no_grad():
            packed_logits(model, other)
        got_gradients = gradients(model, got)
    torch.testing.assert_close(got, want, atol=3e-5, rtol=0, check_dtype=False)  # Mamba's logits are float32
    for name, grad in want_gradients.items():
        assert largest(got_gradients[name] - grad) <= 1e-3 * max(largest(grad), 1e-3), name


def test_padding_has_no_keys_of_another_row() -> None:
    """Layers that share chosen keys: those of the first token of 57 lie behind the end of rows of 26."""
    config = small_config(AutoConfig.for_model("hy_v4"))
    model: Any = random_model(config)
    rows = sequences((57, 26, 18), 64)
    row = pack_sequences(make_batch([{"input_ids": ids} for ids in rows]))
    want = torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in rows])
    with torch.no_grad(), admitted(config, generic_family(config)), packed_layers(model):
        got = packed_logits(model, row)
    torch.testing.assert_close(got, want.detach(), atol=1e-4, rtol=0, check_dtype=False)


def test_what_is_made_of_a_mask_carries_its_context() -> None:
    context = PackedContext(torch.tensor([0, 2, 5], dtype=torch.int32), 3)
    mask = ContextMask.of(context)
    made = torch.ones(3, 1, 1).masked_fill(mask < 1, 2.0).to(torch.float64)
    assert carried(None, made, torch.ones(1)) is context
    assert carried(torch.ones(1), None) is None
