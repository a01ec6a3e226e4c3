"""Private names of torch and transformers that seqpack uses, all of them: what a new version may break is here."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
