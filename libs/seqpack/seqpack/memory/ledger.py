"""The memory ledger of a process: what stays in memory, under its name, registered where it is allocated.

An entry is an owner and a function to what it holds now, since tensors move, come later and are replaced. Owners are
kept weakly: what is freed leaves the ledger. `observe` reads an entry at the moment at which it is largest; `record`
takes the bytes of what is there for a moment alone, such as a bucket of weights on its way. A row has the largest bytes
that were seen of its name. Memory that several entries hold counts once, for the entry that was registered first.

A plan has the same rows by the same names (`runplan`); a test compares the two, and looks for tensors that nobody
registered.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpack.memory.names import BATCH as BATCH
from seqpack.memory.names import BUCKETS as BUCKETS
from seqpack.memory.names import CHECKPOINT as CHECKPOINT
from seqpack.memory.names import GRADIENTS as GRADIENTS
from seqpack.memory.names import NAMES as NAMES
from seqpack.memory.names import OFFLOAD as OFFLOAD
from seqpack.memory.names import OPTIMIZER as OPTIMIZER
from seqpack.memory.names import PLACES as PLACES
from seqpack.memory.names import REFERENCE as REFERENCE
from seqpack.memory.names import SAMPLER_CACHES as SAMPLER_CACHES
from seqpack.memory.names import SAMPLER_STAGED as SAMPLER_STAGED
from seqpack.memory.names import SAMPLER_WEIGHTS as SAMPLER_WEIGHTS
from seqpack.memory.names import WEIGHTS as WEIGHTS
from seqpack.private_api import is_traceable_wrapper_subclass


class MemoryRow(NamedTuple):
    """Bytes of one name, on accelerators and in host memory."""

    name: str
    device: int
    host: int


Held = Callable[[Any], Any]
"""A function from an owner to what it holds: tensors, in any nesting of containers and plain objects."""


@dataclass(eq=False)
class _Entry:
    name: str
    owner: "weakref.ref[Any]"
    held: Held
    device: int = 0
    host: int = 0


_entries: list[_Entry] = []
_recorded: dict[str, MemoryRow] = {}
_lock = threading.Lock()


def register(name: str, owner: object, held: Held) -> None:
    """Add an entry: `held(owner)` is what it holds, as long as the owner lives."""
    with _lock:
        _entries.append(_Entry(name, weakref.ref(owner), held))


def observe(owner: object, name: str, again: bool = False) -> None:
    """Read an owner's entry of a name now, if nothing was seen of it yet; `again`: also if something was."""
    for entry in _alive():
        if entry.name == name and entry.owner() is owner and (again or not entry.device + entry.host):
            _note(entry, _storages(entry.held(owner)).values())


def record(name: str, held: Any) -> None:
    """Take the bytes of what is there for a moment: the largest of a name is kept."""
    device, host = _sum(_storages(held).values())
    with _lock:
        before = _recorded.get(name, MemoryRow(name, 0, 0))
        _recorded[name] = MemoryRow(name, max(before.device, device), max(before.host, host))


def rows() -> list[MemoryRow]:
    """Return the rows that have memory, in order: at most so many bytes were seen of each name."""
    bytes_seen = {name: [row.device, row.host] for name, row in _recorded.items()}
    seen: set[Any] = set()
    for entry in _alive():
        mine = {key: size for key, size in _storages(entry.held(entry.owner())).items() if key not in seen}
        seen |= mine.keys()
        _note(entry, mine.values())
        row = bytes_seen.setdefault(entry.name, [0, 0])
        row[0] += entry.device
        row[1] += entry.host
    order = {name: place for place, name in enumerate(NAMES)}
    table = [MemoryRow(name, *sizes) for name, sizes in bytes_seen.items() if sum(sizes)]
    return sorted(table, key=lambda row: order.get(row.name, len(order)))


def metrics() -> dict[str, float]:
    """Return the rows as metrics in GiB: memory/device/NAME_gib and memory/host/NAME_gib, where there is any."""
    sizes = {(place, row.name): size for row in rows() for place, size in zip(PLACES, row[1:], strict=True)}
    return {
        f"memory/{place}/{name.replace(' ', '_')}_gib": size / 2**30 for (place, name), size in sizes.items() if size
    }


def registered() -> set[Any]:
    """Return the keys (`key_of`) of all memory that an entry holds now."""
    return {key for entry in _alive() for key in _storages(entry.held(entry.owner()))}


def clear() -> None:
    """Forget the largest bytes so far, as a run does at its start. Entries stay."""
    with _lock:
        _recorded.clear()
        for entry in _entries:
            entry.device = entry.host = 0


def key_of(tensor: Tensor) -> Any:
    """Return what two tensors over the same memory have in common; None where there is none."""
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return None if tensor.device.type == "meta" else (tensor.device.type, id(tensor))
    storage = tensor.untyped_storage()
    return (tensor.device.type, storage.data_ptr()) if storage.nbytes() else None


def tensors_in(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in a value, those that hold the memory of shards and views: in containers, and in the
    attributes of objects other than modules."""
    seen = set() if seen is None else seen
    if id(value) in seen or value is None or isinstance(value, _PLAIN):
        return
    seen.add(id(value))
    inside: Iterable[Any]
    if type(value) in (Tensor, nn.Parameter):
        yield value
        return
    if isinstance(value, Tensor):  # a wrapper of others: a shard, jagged rows
        if is_traceable_wrapper_subclass(value):
            inside = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
        else:
            inside = [*vars(value).values()]
    elif isinstance(value, dict):
        inside = [*value.values()]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        inside = [*value]
    elif hasattr(value, "__dict__") and (is_dataclass(value) or not callable(value)) and not isinstance(value, type):
        inside = [*vars(value).values()]
    else:
        return
    for one in inside:
        if type(one) not in _SCALARS:  # of a list of tokens each is one: no generator for it
            yield from tensors_in(one, seen)


_PLAIN = (str, bytes, int, float, nn.Module, torch.device, torch.dtype, torch.Generator)
"""Types that are not looked into."""
_SCALARS = frozenset((str, bytes, int, float, bool, type(None)))


class _Size(NamedTuple):
    host: bool
    bytes: int


def _storages(held: Any) -> dict[Any, _Size]:
    sizes = {}
    for tensor in tensors_in([*held] if isinstance(held, Iterator) else held):
        key = key_of(tensor)
        if key is not None:
            size = tensor.untyped_storage().nbytes() if tensor.layout == torch.strided else tensor.nbytes
            sizes[key] = _Size(tensor.device.type == "cpu", size)
    return sizes


def _sum(sizes: Iterable[_Size]) -> tuple[int, int]:
    every = list(sizes)
    return sum(one.bytes for one in every if not one.host), sum(one.bytes for one in every if one.host)


def _note(entry: _Entry, sizes: Iterable[_Size]) -> None:
    device, host = _sum(sizes)
    entry.device, entry.host = max(entry.device, device), max(entry.host, host)


def _alive() -> list[_Entry]:
    with _lock:
        _entries[:] = [entry for entry in _entries if entry.owner() is not None]
        return list(_entries)
