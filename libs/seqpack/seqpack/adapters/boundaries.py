"""Where the sequences of a call begin: the flash arguments become a context, restarts without them are refused."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from seqpack.adapters.context import CONTEXT_KEY, ContextMask, PackedContext
from seqpack.adapters.subclasses import stock_class
from seqpack.private_api import assert_async

_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_POSITIONAL = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")
"""The first parameters of transformers' decoders."""
_CACHES = ("past_key_values", "cache")
"""The cache of a call, before and since transformers 5.24."""


def context_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[PackedContext | None, dict[str, Any]]:
    """Return the context of a call with flash arguments and the keywords with it in their place; None without them.

    ValueError for a call that is no packed row; nothing is read that waits for a device.
    """
    bounds, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if bounds is None:
        return None, kwargs
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if args or tokens is None:
        raise ValueError("a packed row goes to the model by keyword: input_ids=..., cu_seq_lens_q=..., ...")
    _check_row(kwargs, tokens, bounds)
    context = PackedContext(bounds.to(torch.int32), int(bounds.diff().max() if longest is None else longest))
    others = {key: value for key, value in kwargs.items() if key not in _FLASH}
    return context, {**others, "attention_mask": no_mask(tokens), "use_cache": False, CONTEXT_KEY: context}


def no_mask(like: Tensor) -> Tensor:
    """Return a mask that transformers passes on instead of building one of T x T; packed layers ignore it."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool, device=like.device)


class _Masks(dict[str, Tensor]):
    """One mask for all kinds of layers: the form in which decoders take masks that they do not make."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def __missing__(self, kind: str) -> Tensor:
        return self.mask


def wrapping_mask(decoder: nn.Module, context: PackedContext) -> Any:
    """Return the mask that carries a context to a decoder's layers: one for each kind where it takes several."""
    mask = ContextMask.of(context)
    return _Masks(mask) if _takes_masks(stock_class(decoder).forward) else mask


@cache
def _takes_masks(forward: Callable[..., Any]) -> bool:
    code = inspect.getsource(inspect.unwrap(forward))
    return "attention_mask, dict)" in code and "create_recurrent_attention_mask" in code


def refuse_restarts(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError where positions begin again inside a row: without boundaries, sequences would mix.

    Positions of padding do not count. Waits for the device; a call of one token, as in generation, has nothing to read.
    """
    given = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
    positions, mask = given.get("position_ids"), given.get("attention_mask")
    if positions is None or positions.shape[-1] < 2 or positions.is_meta:
        return
    begins = restarts(positions)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        real = mask[:, -positions.shape[-1] :].to(torch.bool)
        begins = begins & real[:, 1:] & real[:, :-1]
    elif mask is not None and _cached(given):
        return  # a mask that generate() prepared: it hides the padding, whose positions are anything
    _refuse(
        begins.any(),
        "position_ids begin again inside a row, and nothing says where sequences begin: an adapted model needs "
        "cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k as PackedCollator makes them (something between "
        "loader and model may drop them), or one sequence a row",
    )


def restarts(positions: Tensor) -> Tensor:
    """Return bool[rows, T - 1], whether the next token begins again, from positions i64[rows, T] or [axes, rows, T].

    Inside a sequence positions rise from token to token; those of several axes (images: time, height, width) in order.
    """
    steps = (positions if positions.ndim == 3 else positions[None]).diff(dim=-1)
    rises = steps[-1] > 0
    for step in reversed(steps[:-1].unbind()):
        rises = (step > 0) | ((step == 0) & rises)
    return ~rises


def _check_row(kwargs: Mapping[str, Any], tokens: Tensor, bounds: Tensor) -> None:
    if tokens.shape[0] != 1:
        raise ValueError(f"a packed row is one row, input_ids has {tokens.shape[0]}: flatten them, [1, T]")
    if kwargs.get("position_ids") is None:
        raise ValueError("a packed row needs position_ids that begin again with each sequence")
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and mask.device.type == "cpu":
        _refuse(~mask.all(), "a packed row has no padding outside of its sequences: leave attention_mask out")
    if _cached(kwargs) or kwargs.get("use_cache"):
        raise ValueError("a packed row has no cache: use_cache=False")
    if bounds.device.type == "cpu":
        _check_bounds(bounds, tokens.shape[1], kwargs["position_ids"])


def _check_bounds(bounds: Tensor, tokens: int, positions: Tensor) -> None:
    if not torch.compiler.is_compiling() and int(bounds[-1]) != tokens:
        raise ValueError(f"cu_seq_lens_q ends at {int(bounds[-1])}, the row has {tokens} tokens")
    if positions.device.type == "cpu" and tokens > 1:
        first = torch.zeros(tokens + 1, dtype=torch.bool).index_fill(0, bounds.to(torch.int64), True)
        unnamed = restarts(positions)[0] & ~first[1:-1]
        _refuse(unnamed.any(), "position_ids begin again where cu_seq_lens_q has no boundary: sequences would mix")


def _cached(kwargs: Mapping[str, Any]) -> bool:
    return any(kwargs.get(name) is not None for name in _CACHES)


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise ValueError where `wrong`; in a compiled graph RuntimeError, without a graph break."""
    if torch.compiler.is_compiling():
        assert_async(~wrong, message)
    elif bool(wrong):
        raise ValueError(message)
