"""Only rows that are read go through the last layer's projections: scores and gradients stay those of all rows."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engines.families.registry import admitted, family_of
from engines.proofs.float64 import KeepFloat64
from engines.prove.generic_family import generic_family
from engines.prove.proof import random_model, small_config
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.read_rows import READ, compute_read_rows
from engines.tiny import tiny_batch, tiny_model
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import packed_hidden
from seqpack.batches.packed import pack_sequences

LENGTHS = [7, 1, 19, 4, 2, 33]
DELTA_LAST = {"num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "dense": ("dense", {}, 3),
    "delta net last": ("dense", DELTA_LAST, 3),
    "experts": ("moe", {}, 0),
    "joint projections, experts": ("next", DELTA_LAST, 0),
    "attention alone": ("attention", {}, 3),
}
"""A model, and how many modules look at the rows."""


def outcome(model: Any, rows: Tensor, say: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states of `rows`, and the gradients of a sum in which every number weighs differently."""
    packed = pack_sequences(tiny_batch(LENGTHS, seed=3))
    context = PackedContext(packed.cu_seqlens, packed.max_seqlen)
    if say:
        context.derived[READ] = rows
    model.zero_grad()
    with KeepFloat64() if model.dtype == torch.float64 else nullcontext():
        hidden = packed_hidden(model, packed.values["input_ids"], packed.position_ids, context).index_select(0, rows)
        (hidden * torch.sin(torch.arange(hidden.numel(), dtype=hidden.dtype)).view_as(hidden)).sum().backward()
    return hidden.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def calls(model: Any, patch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """How many rows each linear layer of the last decoder layer computes; to be called before `compute_read_rows`."""
    seen: dict[str, list[int]] = {}
    layer = family_of(model.config).layers(model)[-1]
    names = {module: name for name, module in layer.named_modules()}
    plain = torch.nn.Linear.forward

    def forward(module: torch.nn.Linear, x: Tensor) -> Tensor:
        if module in names:
            seen.setdefault(names[module], []).append(x[..., 0].numel())
        return plain(module, x)

    patch.setattr(torch.nn.Linear, "forward", forward)
    return seen


@pytest.mark.parametrize("case", CASES)
def test_scores_and_gradients_are_those_of_all_rows(case: str) -> None:
    """In float64. Shuffled rows, one of them alone in its sequence."""
    kind, changes, modules = CASES[case]
    model: Any = tiny_model(kind, scale=2.0, **changes).double()
    if kind in ("moe", "next"):
        model.set_experts_implementation("eager")  # the grouped matrix product of experts has no float64
    adapt_for_packing(model)
    changed = compute_read_rows(model)
    assert len(changed) == modules
    rows = torch.tensor([40, 3, 7, 30, 12, 65, 33])
    wanted, wanted_grads = outcome(model, rows, say=False)
    hidden, grads = outcome(model, rows, say=True)
    torch.testing.assert_close(hidden, wanted, rtol=1e-10, atol=1e-10)
    assert grads.keys() == wanted_grads.keys()
    for name, grad in grads.items():
        assert (grad - wanted_grads[name]).abs().max() <= 1e-9 * (1 + wanted_grads[name].abs().max()), name


def test_recomputed_layers_see_the_same_rows() -> None:
    model: Any = tiny_model("dense", scale=2.0).train()
    adapt_for_packing(model)
    compute_read_rows(model)
    rows = torch.tensor([3, 40, 12])
    hidden, wanted = outcome(model, rows, say=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, grads = outcome(model, rows, say=True)
    assert torch.equal(again, hidden)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-5, atol=1e-5)


def test_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("dense")
    adapt_for_packing(model)
    seen = calls(model, monkeypatch)
    compute_read_rows(model)
    tokens = sum(LENGTHS)
    outcome(model, torch.tensor([5, 60]), say=True)
    assert {name for name, rows in seen.items() if rows == [tokens]} == {"self_attn.k_proj", "self_attn.v_proj"}
    assert {tuple(rows) for rows in seen.values()} == {(tokens,), (2,)}
    seen.clear()
    outcome(model, torch.arange(tokens), say=True)  # nothing to save: everything at once
    assert all(rows == [tokens] for rows in seen.values())


def test_no_row_at_all_reaches_every_parameter() -> None:
    """A rank with nothing to score takes part in every collective: each parameter has a gradient, of zeros."""
    model: Any = tiny_model("dense")
    adapt_for_packing(model)
    compute_read_rows(model)
    hidden, grads = outcome(model, torch.empty(0, dtype=torch.int64), say=True)
    assert hidden.shape[0] == 0
    untouched = {n for n, _ in model.named_parameters()} - grads.keys()
    assert untouched <= {"lm_head.weight"}
    assert all(not grad.any() for grad in grads.values())


def test_a_model_whose_layers_are_not_known_computes_all_rows() -> None:
    """Mamba's output projection has the name of a known one, and is called with padded rows."""
    config = small_config(AutoConfig.for_model("mamba2"))
    with admitted(config, generic_family(config)):
        assert compute_read_rows(random_model(config)) == ()
