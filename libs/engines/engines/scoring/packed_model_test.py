"""Packed calls equal one-by-one calls, logits and all gradients; without a context nothing changes; undo restores."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.proofs.float64 import KeepFloat64
from engines.scoring.packed_model import adapt_for_packing, packed_logits
from engines.tiny import tiny_batch, tiny_model
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden
from seqpack.batches.packed import pack_sequences
from seqpack.testing import assert_packing_isolated

LENGTHS = [7, 1, 19, 4, 2, 33]
KINDS = ["dense", "moe", "next", "attention"]


def one_by_one(model: Any, batch: TensorDict) -> Tensor:
    rows = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in batch["input_ids"].unbind()]
    return torch.cat(rows)


def gradients(model: Any, logits: Tensor) -> dict[str, Tensor]:
    """Of a sum in which every logit weighs differently."""
    model.zero_grad()
    weights = torch.sin(torch.arange(logits.numel(), dtype=logits.dtype)).view_as(logits)
    (logits * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_isolated(kind: str) -> None:
    """In float64 from end to end, so that nothing but packing could differ: a leak of 1e-8 would fail."""
    model: Any = tiny_model(kind).double()
    model.set_experts_implementation("eager")  # the grouped matrix product of experts has no float64
    batch = tiny_batch(LENGTHS)
    with KeepFloat64():
        want = one_by_one(model, batch)
        want_grads = gradients(model, want)
        adapt_for_packing(model)
        got = packed_logits(model, pack_sequences(batch))
        got_grads = gradients(model, got)
    assert got.dtype == want.dtype == torch.float64
    torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-9)
    for name, grad in got_grads.items():
        assert (grad - want_grads[name]).abs().max() <= 1e-9 * want_grads[name].abs().max(), name


@pytest.mark.parametrize("kind", KINDS)
def test_isolated_by_the_common_check(kind: str) -> None:
    model = tiny_model(kind)
    adapt_for_packing(model)
    assert_packing_isolated(model, packed_forward=packed_logits)
    assert_packing_isolated(model, packed_forward=packed_logits, align=4, bucket=32)


@pytest.mark.parametrize("kind", ["dense", "attention"])
def test_nothing_else_moves(kind: str) -> None:
    """Change one sequence: the others' logits are bitwise the same."""
    model = tiny_model(kind)
    adapt_for_packing(model)
    batch = tiny_batch(LENGTHS)
    packed = pack_sequences(batch)
    before = packed_logits(model, packed)
    start, stop = packed.cu_seqlens[2:4].tolist()
    ids = packed.values["input_ids"].clone()
    ids[start:stop] = 3
    after = packed_logits(model, packed.with_values(input_ids=ids))
    same = (before == after).all(-1)
    assert same[:start].all()
    assert same[stop:].all()
    assert not same[start:stop].all()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_context_the_model_is_as_before(kind: str) -> None:
    model: Any = tiny_model(kind)
    plain = copy.deepcopy(model)
    adapt_for_packing(model)
    ids = torch.randint(2, 48, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for kwargs in ({}, {"attention_mask": mask}, {"attention_mask": mask, "use_cache": True}):
        assert torch.equal(model(ids, **kwargs).logits, plain(ids, **kwargs).logits)
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_undo_restores_the_instance(kind: str) -> None:
    model: Any = tiny_model(kind)
    config, before = model.config, [(type(module), set(vars(module))) for module in model.modules()]
    adaptation = adapt_for_packing(model)
    assert adapt_for_packing(model) == adaptation
    assert len(adaptation.changes) == config.num_hidden_layers
    adaptation.undo()
    adaptation.undo()
    assert model.config is config
    assert [(type(module), set(vars(module))) for module in model.modules()] == before
    with pytest.raises(ValueError, match="adapt_for_packing"):
        packed_logits(model, pack_sequences(tiny_batch([3])))


def test_another_model_of_the_same_config_is_not_touched() -> None:
    first: Any = tiny_model("dense")
    second: Any = type(first)(first.config)
    before = [type(module) for module in second.modules()]
    known = dict(ALL_ATTENTION_FUNCTIONS)
    adapt_for_packing(first)
    assert {name: ALL_ATTENTION_FUNCTIONS[name] for name in known} == known
    assert [type(module) for module in second.modules()] == before
    assert all(module.config is second.config for module in second.modules() if hasattr(module, "config"))
    assert second.config._attn_implementation == "sdpa"


def test_multi_axis_positions_reach_the_rotary_embedding() -> None:
    model = tiny_model("dense")
    adapt_for_packing(model)
    packed = pack_sequences(tiny_batch([6, 5]))
    plain = packed_logits(model, packed)
    rows = packed.position_ids.expand(3, -1)
    torch.testing.assert_close(packed_logits(model, packed.with_values(position_ids=rows.contiguous())), plain)
    moved = torch.stack([packed.position_ids, packed.position_ids // 2, packed.position_ids])
    assert not torch.allclose(packed_logits(model, packed.with_values(position_ids=moved)), plain)


def test_recomputed_layers_see_the_context() -> None:
    model: Any = tiny_model("dense").train()
    adapt_for_packing(model)
    packed = pack_sequences(tiny_batch(LENGTHS))
    want = gradients(model, packed_logits(model, packed))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = gradients(model, packed_logits(model, packed))
    for name, grad in got.items():
        torch.testing.assert_close(grad, want[name], atol=1e-5, rtol=1e-5)


def test_a_layer_that_drops_the_context_is_an_error() -> None:
    model: Any = tiny_model("attention")
    adapt_for_packing(model)
    layer = model.model.layers[1]
    inner = layer.forward
    layer.forward = lambda *args, packed_context=None, **kwargs: inner(*args, **kwargs)
    packed = pack_sequences(tiny_batch([4, 3]))
    context = PackedContext(packed.cu_seqlens, packed.max_seqlen)
    with pytest.raises(RuntimeError, match="3 of 4 layers"):
        packed_hidden(model, packed.values["input_ids"], packed.position_ids, context)


@pytest.mark.parametrize(("argument", "value"), [("dropout", 0.1), ("position_bias", 1)])
def test_attention_arguments_that_are_not_handled_are_refused_by_name(argument: str, value: Any) -> None:
    model: Any = tiny_model("attention")
    adapt_for_packing(model)
    inner = model.model.layers[0].self_attn
    original = inner.forward
    inner.forward = lambda *args, **kwargs: original(*args, **kwargs, **{argument: value})
    if argument == "dropout":
        inner.forward = original
        inner.attention_dropout = value
        model.train()
    with pytest.raises(ValueError, match=argument):
        packed_logits(model, pack_sequences(tiny_batch([4, 3])))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no config"):
        adapt_for_packing(torch.nn.Linear(2, 2))
    from transformers import MambaConfig, MambaForCausalLM

    mamba = MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, state_size=4))
    with pytest.raises(ValueError, match="family 'mamba' is not supported"):
        adapt_for_packing(mamba)
