"""Packed sequences through the engine's scorer against the stock model, one sequence at a time, in float64."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.execution.micro_batches import MicroBatch
from engines.inputs.model_inputs import InputBuilder
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.token_scorer import TokenScorer
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import pack_sequences


@dataclass(frozen=True)
class Difference:
    """The largest differences from stock transformers: log-probs absolutely, gradients relative to each parameter's
    largest entry, which counts as at least a thousandth of the largest of all."""

    log_probs: float
    gradients: float
    worst: str = ""
    """The parameter whose gradient differs most."""

    def __str__(self) -> str:
        """Return both numbers."""
        return f"log-probs {self.log_probs:.1e}, gradients {self.gradients:.1e} ({self.worst})"


@dataclass(frozen=True)
class Result:
    """Log-probs [N] of all tokens but first ones, and gradients by parameter of a weighted sum of them."""

    log_probs: Tensor
    gradients: Mapping[str, Tensor]


def sequences(lengths: Sequence[int], vocabulary: int, seed: int = 0) -> list[Tensor]:
    """Return random tokens i64[length] for each length; ids below 3 are left to special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator) for length in lengths]


def stock(model: Any, rows: Sequence[Tensor], gradients: bool = True) -> Result:
    """Return the stock model's result, one sequence at a time; without gradients where they are not asked for."""
    with _fresh(model), torch.set_grad_enabled(gradients):
        return _result(model, [chosen_log_probs(model, ids) for ids in rows], gradients)


def scored(model: Any, rows: Sequence[Tensor], builder: InputBuilder, gradients: bool = True) -> Result:
    """Return the result of the engine's scorer over these sequences in one micro-batch."""
    packed = pack_sequences(make_batch([{"input_ids": ids} for ids in rows]))
    wanted = packed.token_mask
    wanted[packed.cu_seqlens[:-1].to(torch.int64)] = False
    inputs = builder.inputs(MicroBatch(packed, packed.indices, wanted, ranks=(0,)))
    with _fresh(model), torch.set_grad_enabled(gradients):
        scores = TokenScorer(model, logit_chunk=16).eval()(inputs, 1.0, False)
        return _result(model, [scores.log_probs], gradients)


@contextmanager
def packed_layers(model: Any) -> Iterator[None]:
    """Adapt the model's layers for packed rows while this is open."""
    adaptation = adapt_for_packing(model)
    try:
        yield
    finally:
        adaptation.undo()


def difference(got: Result, want: Result) -> Difference:
    """Return how far one result is from another; infinite where there is a NaN."""
    floor = 1e-3 * max((float(grad.abs().max()) for grad in want.gradients.values()), default=0.0)
    worst, name = 0.0, ""
    for parameter, grad in want.gradients.items():
        value = largest(got.gradients[parameter] - grad) / max(float(grad.abs().max()), floor, 1e-300)
        if not value <= worst:
            worst, name = value, parameter
    return Difference(largest(got.log_probs - want.log_probs), worst, name)


def largest(tensor: Tensor) -> float:
    """Return the largest absolute value; infinite where there is a NaN."""
    value = float(tensor.abs().max()) if tensor.numel() else 0.0
    return value if value == value else float("inf")


def chosen_log_probs(model: Any, ids: Tensor) -> Tensor:
    """Return the log-probs [T - 1] that the stock model gives to the tokens of a sequence but its first."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    table = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    return table[: len(ids) - 1].gather(1, ids[1:, None]).squeeze(1)


def _result(model: nn.Module, parts: Sequence[Tensor], with_gradients: bool = True) -> Result:
    """Return log-probs, and gradients of their sum with another weight for each."""
    log_probs = torch.cat(list(parts))
    if not with_gradients:
        return Result(log_probs, {})
    weights = torch.sin(torch.arange(log_probs.numel(), dtype=log_probs.dtype, device=log_probs.device))
    (log_probs * weights).sum().backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    return Result(log_probs.detach(), gradients)


@contextmanager
def _fresh(model: nn.Module) -> Iterator[None]:
    model.zero_grad(set_to_none=True)
    yield
    model.zero_grad(set_to_none=True)
