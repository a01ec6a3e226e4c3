"""Private names of torch, transformers and datasets that seqpack uses: what a new version may break is here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils.data import get_worker_info
from torch.utils.data._utils import worker as torch_worker

assert_async = torch._assert_async
"""Assertion that nobody waits for; part of a compiled graph."""


def attention_of(config: Any) -> str:
    """Return the name of the attention function that a transformers config asks for."""
    name: str = config._attn_implementation
    return name


def set_attention(config: Any, name: str) -> None:
    """Let a transformers config ask for this attention function."""
    config._attn_implementation = name


def bloom_heads(layer: Any, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [1, heads, T, D] of Bloom's joined projection."""
    heads: tuple[Tensor, Tensor, Tensor] = layer._reshape(mixed)
    return heads


def writes(tensor: Tensor) -> int:
    """Return how often a tensor was written to, as torch counts it; not for tensors of inference mode."""
    return tensor._version


def rename_ragged(tensor: Any, dimension: int) -> None:
    """Let a jagged tensor say that this is its ragged dimension: a wrong label, for tests."""
    tensor._ragged_idx = dimension


def split_by_rank(source: Any) -> bool:
    """Return whether a streamed dataset was divided among ranks (`split_dataset_by_node`)."""
    return getattr(source, "_distributed", None) is not None


def last_step(source: Any) -> Any:
    """Return the last step of which a streamed dataset is made; None where it is of another kind."""
    return getattr(source, "_ex_iterable", None)


@contextmanager
def hidden_worker() -> Iterator[None]:
    """Hide this worker from what is read meanwhile: a source that divides itself among workers gives all its samples.

    `get_worker_info` has no public way to be told otherwise. RuntimeError where it does not read that name any more.
    """
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        if get_worker_info() is not None:
            raise RuntimeError("this version of torch keeps its worker elsewhere: sources would divide themselves")
        yield
    finally:
        torch_worker._worker_info = info
