"""A model over layer functions against stock transformers, one sequence at a time: logits and every gradient."""

from itertools import accumulate
from typing import Any

import pytest
import torch

from engines.fast.compiling import compilations
from engines.fast.layers import use_layer_functions
from engines.proofs.float64 import KeepFloat64
from engines.scoring.packed_model import adapt_for_packing
from engines.tiny import tiny_model
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden

LENGTHS = (5, 1, 17, 9)


def context_of(lengths: tuple[int, ...]) -> PackedContext:
    edges = (0, *accumulate(lengths))
    return PackedContext(torch.tensor(edges, dtype=torch.int32), max(lengths), edges=edges)


def run_packed(
    model: Any, ids: torch.Tensor, lengths: tuple[int, ...], weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = packed_hidden(model, ids, positions, context_of(lengths))
    return results(model, model.get_output_embeddings()(hidden), weights)


def run_stock(
    model: Any, ids: torch.Tensor, lengths: tuple[int, ...], weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    logits = torch.cat([model(part[None], use_cache=False).logits[0] for part in ids.split(lengths)])
    return results(model, logits, weights)


def results(model: Any, logits: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    (logits.log_softmax(-1) * weights).sum().backward()
    return {"logits": logits.detach()} | {name: p.grad for name, p in model.named_parameters()}


def inputs(
    lengths: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 48, (sum(lengths),), generator=generator)
    return ids, torch.randn(sum(lengths), 48, generator=generator, dtype=dtype)


def stock_model(**changes: Any) -> Any:
    model: Any = tiny_model(**changes).double().eval()
    model.set_experts_implementation("eager")  # the loop over experts
    return model


def fast_model(backend: str | None, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    model = tiny_model(**changes).to(dtype).eval()
    adapt_for_packing(model)
    use_layer_functions(model, backend)
    return model


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    return max(float((found[key] - value).norm() / value.norm()) for key, value in expected.items())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"linear_num_key_heads": 4},
        {"num_key_value_heads": 4, "tie_word_embeddings": False},
        {"hidden_size": 24},
        {"kind": "attention"},
        {"kind": "attention", "num_key_value_heads": 4, "tie_word_embeddings": True},
        {"kind": "moe"},
        {"kind": "moe", "num_experts": 9, "num_experts_per_tok": 3},
        {"kind": "attention_moe"},
        {"kind": "attention_moe", "norm_topk_prob": False, "tie_word_embeddings": True, "mlp_only_layers": [1]},
    ],
)
def test_equals_stock_transformers(changes: dict[str, Any]) -> None:
    ids, weights = inputs(LENGTHS)
    with KeepFloat64():
        expected = run_stock(stock_model(**changes), ids, LENGTHS, weights)
        got = run_packed(fast_model(None, **changes), ids, LENGTHS, weights)
    assert largest_error(got, expected) < 1e-9


def test_equals_the_packed_path_in_float64() -> None:
    """The plain reference beside it: the same packed call without layer functions."""
    ids, weights = inputs(LENGTHS)
    plain = tiny_model().double().eval()
    adapt_for_packing(plain)
    with KeepFloat64():
        expected = run_packed(plain, ids, LENGTHS, weights)
        got = run_packed(fast_model(None), ids, LENGTHS, weights)
    assert largest_error(got, expected) < 1e-9


@pytest.mark.parametrize(
    ("backend", "kind", "graphs"),
    [
        ("eager", "dense", 8),
        ("aot_eager", "dense", 8),
        ("aot_eager", "attention", 6),
        ("aot_eager", "moe", 10),
        ("aot_eager", "attention_moe", 6),
    ],
)
def test_traced_whole_and_once(backend: str, kind: str, graphs: int) -> None:
    """Whatever the batch, each function and gradient is traced once (the norm's too), without a graph break."""
    torch._dynamo.reset()
    model = fast_model(backend, torch.float32, kind=kind)
    plain = fast_model(None, torch.float32, kind=kind)
    before, counts = compilations(), []
    for step, lengths in enumerate([LENGTHS, (7, 3), (2,), (40, 1, 1, 6, 9), (8, 8), (32,), (1, 1), (3, 2, 1)]):
        ids, weights = inputs(lengths, torch.float32, step)
        model.zero_grad()
        plain.zero_grad()
        got, expected = (run_packed(one, ids, lengths, weights) for one in (model, plain))
        assert largest_error(got, expected) < 1e-5
        counts.append(compilations() - before)
    assert counts == [graphs] * len(counts)


def test_one_token_runs_uncompiled() -> None:
    torch._dynamo.reset()
    model, before = fast_model("eager", torch.float32), compilations()
    ids_and_weights = inputs((1,), torch.float32)
    run_packed(model, ids_and_weights[0], (1,), ids_and_weights[1])
    assert compilations() == before


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_calls_without_a_context_and_after_undo_are_stock(kind: str) -> None:
    model: Any = tiny_model(kind).eval()
    ids = inputs((9,))[0][None]
    expected = model(ids).logits
    adapt_for_packing(model)
    functions = use_layer_functions(model, None)
    assert torch.equal(model(ids).logits, expected)
    functions.undo()
    stock: Any = tiny_model(kind)
    changed = [
        (one.base_model.norm, *one.base_model.layers, *(m for x in one.base_model.layers for m in x.mlp.modules()))
        for one in (model, stock)
    ]
    assert [type(module) for module in changed[0]] == [type(module) for module in changed[1]]
    assert [set(vars(module)) for module in changed[0]] == [set(vars(module)) for module in changed[1]]


def test_nothing_crosses_a_boundary() -> None:
    """Another first sequence changes nothing in the second, bit for bit."""
    model = fast_model(None, torch.float32)
    ids, weights = inputs((6, 11), torch.float32)
    before = run_packed(model, ids, (6, 11), weights)["logits"]
    ids[:6] = ids[:6].flip(0)
    model.zero_grad()
    after = run_packed(model, ids, (6, 11), weights)["logits"]
    assert not torch.equal(before[:6], after[:6])
    assert torch.equal(before[6:], after[6:])
