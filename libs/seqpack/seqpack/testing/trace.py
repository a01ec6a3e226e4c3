"""Which module of a model treats a packed row differently from the sequences alone: found by forward hooks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Origin:
    """The first module whose output differs although its inputs do not."""

    name: str
    kind: str
    error: float

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}): same inputs, output off by {self.error:.1e}"


class _Call(NamedTuple):
    """One call of a module: the tensors that went in and came out, by their place in the arguments."""

    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def find_origin(
    model: nn.Module,
    run_packed: Callable[[], object],
    run_alone: Sequence[Callable[[], object]],
    spans: Sequence[tuple[int, int]],
    total: int,
    tolerance: float,
) -> Origin | None:
    """Run the model packed and alone, and return the innermost module whose outputs first differ.

    Args:
        model: the model that the callables run.
        run_packed: one forward call over the packed row.
        run_alone: one forward call for each sequence.
        spans: (start, length) of each sequence in the row.
        total: tokens of the row; a tensor's token dimension is the one of this size.
        tolerance: relative error above which tensors differ.

    Returns:
        The module, or None where no module was seen to have equal inputs and different outputs.
    """
    packed = _record(model, run_packed)
    alone = [_record(model, run) for run in run_alone]
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    for key, call in packed.items():
        others = [calls[key] for calls in alone if key in calls]
        if len(others) != len(alone):
            continue
        into = _worst(call.inputs, [o.inputs for o in others], spans, total)
        out = _worst(call.outputs, [o.outputs for o in others], spans, total)
        if into is not None and into <= tolerance and out is not None and out > tolerance:
            return Origin(key[0] or "(the model itself)", kinds[key[0]], out)
    return None


def _record(model: nn.Module, run: Callable[[], object]) -> dict[tuple[str, int], _Call]:
    """Run once and return every module call, innermost first, by (module name, number of its earlier calls)."""
    calls: dict[tuple[str, int], _Call] = {}
    counts: dict[str, int] = {}

    def hook(name: str) -> Callable[..., None]:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            number = counts.get(name, 0)
            counts[name] = number + 1
            calls[name, number] = _Call(dict(_tensors({"args": args, **kwargs})), dict(_tensors(output)))

        return keep

    handles = [module.register_forward_hook(hook(name), with_kwargs=True) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _tensors(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, copy) of the tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield path, value.detach().clone()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{path}.{key}")
    elif isinstance(value, tuple | list):
        for index, item in enumerate(value):
            yield from _tensors(item, f"{path}.{index}")


def _worst(
    packed: dict[str, Tensor], alone: Sequence[dict[str, Tensor]], spans: Sequence[tuple[int, int]], total: int
) -> float | None:
    """Return the largest relative error over the tensors that can be compared, None where there are none."""
    errors = []
    for path, value in packed.items():
        others = [tensors[path] for tensors in alone if path in tensors]
        place = _token_dim(value.shape, total)
        if place is None or len(others) != len(alone):
            continue
        pieces = [_cut(value, *place, start, length) for start, length in spans]
        if all(piece.shape == other.shape for piece, other in zip(pieces, others, strict=True)):
            errors.append(max(relative_error(a, b) for a, b in zip(pieces, others, strict=True)))
    return max(errors) if errors else None


def _token_dim(shape: torch.Size, total: int) -> tuple[int, int] | None:
    """Return (dimension, rows per token) of the tokens: the one dimension of size `total`, or a flattened first one."""
    matches = [dim for dim, size in enumerate(shape) if size == total]
    if len(matches) == 1:
        return matches[0], 1
    if not matches and shape and shape[0] and shape[0] % total == 0:
        return 0, shape[0] // total
    return None


def _cut(value: Tensor, dim: int, rows: int, start: int, length: int) -> Tensor:
    return value.narrow(dim, start * rows, length * rows)


def relative_error(a: Tensor, b: Tensor) -> float:
    """Return the norm of a - b over the norm of b; infinite when either holds what is not a number."""
    a, b = a.double(), b.double()
    error = ((a - b).norm() / b.norm().clamp(min=1e-30)).item()
    return error if error == error else float("inf")
