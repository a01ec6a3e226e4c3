"""Stock layers compiled as they are against the plain packed ones, in float64: log-probs and every gradient."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engines.families.registry import admit
from engines.fast.compiling import compilations
from engines.fast.traced_layers import TracedAttention, use_traced_layers
from engines.prove.generic_family import generic_family
from engines.prove.proof import random_model, small_config
from engines.prove.traced import compare_traced, traced_refusal
from engines.scoring.packed_model import adapt_for_packing
from engines.tiny import tiny_config
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden

DENSE = ("llama", "gemma3_text", "olmo2", "phi3", "granite", "cohere2", "starcoder2")
"""Biases, windows, q/k norms of heads and of rows, norms behind, fused projections, several kinds of MLP."""


def config_of(kind: str) -> Any:
    return CONFIG_MAPPING[kind]()


@pytest.mark.parametrize("kind", DENSE)
def test_equals_plain_packed_layers(kind: str) -> None:
    torch._dynamo.reset()
    before = compilations()
    found = compare_traced(config_of(kind), "aot_eager")
    assert max(found.log_probs, found.gradients) < 1e-9
    kinds = set(getattr(config_of(kind), "layer_types", None) or [1])
    assert 0 < compilations() - before <= len(kinds)  # layers of one kind share a graph


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_5_text"])
def test_what_is_not_traced_runs_between_graphs(kind: str) -> None:
    """Soft caps and delta nets: the result is the same."""
    torch._dynamo.reset()
    found = compare_traced(config_of(kind), "aot_eager")
    assert max(found.log_probs, found.gradients) < 1e-9


def test_what_cannot_be_compiled_is_named() -> None:
    assert traced_refusal(tiny_config("attention")) is None
    assert "not told where sequences begin" in str(traced_refusal(config_of("falcon")))


def packed(model: Any, lengths: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    edges = (0, *accumulate(lengths))
    ids = torch.randint(3, 40, (edges[-1],), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(n) for n in lengths])
    context = PackedContext(torch.tensor(edges, dtype=torch.int32), max(lengths), edges=edges)
    return packed_hidden(model, ids, positions, context)


def traced_model(backend: str) -> tuple[Any, Any]:
    """A model whose layers are compiled, and what undoes it."""
    small = small_config(config_of("olmo2"))
    admit(small, generic_family(small))
    model: Any = random_model(small)
    adapt_for_packing(model)
    return model, use_traced_layers(model, backend)


def test_one_graph_is_for_all_batches() -> None:
    torch._dynamo.reset()
    model, changes = traced_model("aot_eager")
    before, counts, found = compilations(), [], []
    batches = [(5, 1, 17, 9), (7, 3), (40, 1, 1, 6, 9), (8, 8), (32,), (3, 2, 1)]
    for number, lengths in enumerate(batches):
        found.append(packed(model, lengths, number))
        found[-1].sum().backward()
        counts.append(compilations() - before)
    assert counts == [1] * len(counts)
    changes.undo()
    for number, lengths in enumerate(batches):
        torch.testing.assert_close(found[number], packed(model, lengths, number), rtol=0, atol=1e-12)


def test_calls_without_a_context_of_one_token_and_after_undo_are_stock() -> None:
    torch._dynamo.reset()
    model, changes = traced_model("eager")
    before, ids = compilations(), torch.arange(3, 12)[None]
    called = model(ids).logits
    packed(model, (1,))
    assert compilations() == before
    classes = [type(layer) for layer in model.base_model.layers]
    changes.undo()
    changes.undo()
    assert torch.equal(model(ids).logits, called)
    assert all(type(layer) is not kind for layer, kind in zip(model.base_model.layers, classes, strict=True))
    assert not any("traced_by" in vars(layer) for layer in model.base_model.layers)


@pytest.mark.parametrize(("option", "words"), [({"bias": 1.0}, "does not take bias"), ({"dropout": 0.1}, "no dropout")])
def test_what_packed_attention_does_not_take_is_refused(option: dict[str, Any], words: str) -> None:
    """Not left out without a word, as where a layer hands a bias to its attention."""
    context = PackedContext(torch.tensor([0, 3], dtype=torch.int32), 3, edges=(0, 3))
    module: Any = torch.nn.Module()
    module.config = config_of("llama")
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match=words):
        TracedAttention.of(context)(module, q, q, q, context, **option)


def test_nothing_crosses_a_boundary() -> None:
    """Another first sequence changes nothing in the second, bit for bit."""
    model, _ = traced_model("aot_eager")
    before, after = (packed(model, (6, 11), seed) for seed in (0, 0))
    assert torch.equal(before, after)
    edges = torch.tensor([0, 6, 17], dtype=torch.int32)
    positions = torch.cat([torch.arange(6), torch.arange(11)])
    ids = torch.randint(3, 40, (17,), generator=torch.Generator().manual_seed(0))
    ids[:6] = ids[:6].flip(0)
    other = packed_hidden(model, ids, positions, PackedContext(edges, 11, edges=(0, 6, 17)))
    assert not torch.equal(other[:6], before[:6])
    assert torch.equal(other[6:], before[6:])
