"""Rows count each memory once, follow what moves, and forget what is freed."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from seqpack.memory import ledger


class Owner:
    """What holds tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors: list[Any] = [*tensors]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    gc.collect()
    ledger.clear()
    before = ledger._entries[:]
    ledger._entries.clear()
    yield
    ledger._entries[:] = before
    ledger.clear()


def held(owner: Owner) -> list[Any]:
    return owner.tensors


def test_memory_counts_once_for_whoever_registered_first() -> None:
    whole = torch.zeros(100)
    first, second = Owner(whole), Owner(whole[10:20], torch.zeros(5))
    ledger.register(ledger.WEIGHTS, first, held)
    ledger.register(ledger.SAMPLER_WEIGHTS, second, held)
    assert ledger.rows() == [("weights", 0, 400), ("sampler weights", 0, 20)]
    assert ledger.key_of(whole) in ledger.registered()
    gib = {"memory/host/weights_gib": 400 / 2**30, "memory/host/sampler_weights_gib": 20 / 2**30}
    assert ledger.metrics() == gib


def test_rows_are_the_largest_that_was_seen() -> None:
    owner = Owner()
    ledger.register(ledger.GRADIENTS, owner, held)
    assert ledger.rows() == []
    owner.tensors = [torch.zeros(8)]
    ledger.observe(owner, ledger.GRADIENTS)
    owner.tensors = [torch.zeros(80)]
    ledger.observe(owner, ledger.GRADIENTS)  # it was seen
    owner.tensors = []
    assert ledger.rows() == [("gradients", 0, 32)]
    owner.tensors = [torch.zeros(80)]
    ledger.observe(owner, ledger.GRADIENTS, again=True)
    owner.tensors = []
    assert ledger.rows() == [("gradients", 0, 320)]
    ledger.clear()
    assert ledger.rows() == []


def test_what_is_freed_leaves() -> None:
    owner = Owner(torch.zeros(3))
    ledger.register(ledger.WEIGHTS, owner, held)
    assert ledger.rows()
    del owner
    gc.collect()
    assert ledger.rows() == []


def test_what_is_there_for_a_moment_is_recorded() -> None:
    ledger.record(ledger.BUCKETS, torch.zeros(4))
    ledger.record(ledger.BUCKETS, [torch.zeros(2), {"a": torch.zeros(1)}])
    ledger.record(ledger.BATCH, torch.nested.nested_tensor([torch.zeros(3), torch.zeros(4)], layout=torch.jagged))
    batch, buckets = ledger.rows()
    assert buckets == ("weight sync buckets", 0, 16)
    assert 28 <= batch.host <= 60, "the values, and the offsets"


@dataclass
class Nested:
    """A plain object with tensors inside."""

    inner: dict[str, Any] = field(default_factory=dict)


class Wrapper(torch.Tensor):
    """A tensor without memory of its own, of no protocol of torch's."""

    parts: tuple[Any, ...]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{func} has no memory to read")


def test_tensors_are_found_in_any_nesting_and_modules_are_not_entered() -> None:
    tensor = torch.zeros(2)
    value = [Nested({"x": (tensor, Owner(tensor[1:]))}), torch.nn.Linear(2, 2), lambda: tensor, "text", {1, 2}]
    assert [one.data_ptr() for one in ledger.tensors_in(value)] == [tensor.data_ptr(), tensor[1:].data_ptr()]
    assert list(ledger.tensors_in(torch.zeros(2, device="meta"))) != []
    assert ledger.key_of(torch.zeros(2, device="meta")) is None
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (2,))
    wrapper.parts = ("box", tensor)
    assert [one.data_ptr() for one in ledger.tensors_in(wrapper)] == [tensor.data_ptr()]
    loop: list[Any] = []
    loop.append(loop)
    assert list(ledger.tensors_in(loop)) == []
