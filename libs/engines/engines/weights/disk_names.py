"""Live name <-> names on disk: which tensors of a checkpoint a tensor of the live model is made of.

Two things differ. The text model of a vision-language checkpoint lies under `model.language_model.` on disk and under
`model.` in memory, unless the vision-language model itself is trained. Experts that are one tensor in memory
(`experts.gate_up_proj` [E, 2 I, H], `experts.down_proj` [E, H, I]) may be three tensors an expert on disk
(`experts.0.gate_proj.weight` [I, H], ...). Which of them holds is read off the checkpoint that a model came from, and
an export goes back to the same form. A tensor that a checkpoint holds under another name still, which transformers
reads as well (without `model.`, as a base model is saved; an older layout), keeps that name (`names_in`), and what
transformers joins from several tensors there (`w1` and `w3` of Mixtral's experts) is read from and written to these.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

from torch import Tensor

from engines.weights.stock_names import StockName, stock_names

_BASE, _TEXT, _TOWER = "model.", "model.language_model.", "model.visual."
_MTP = "mtp."
_TEXT_BASE = "language_model."
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
_ONE_EXPERT = re.compile(r"(?:model\.|language_model\.|layers\.).*\bmlp\.experts\.(\d+\.(?:gate|up|down)_proj\.weight)")

_STACKED = (("MergeModulelist", 0),)
"""Transformers' conversion of one tensor an expert."""

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class DiskPart:
    """The tensor `name` on disk is `live[index]`."""

    name: str
    index: Index = ()


@dataclass(frozen=True)
class DiskRead:
    """A read: these rows (None: all) of tensor `name` on disk are `own[index]`, own being some rows of a live one."""

    name: str
    rows: slice | None
    index: Index = ()


@dataclass(frozen=True)
class DiskNames:
    """The names in one checkpoint of what the live model holds; what `split` yields, `reads` reads back."""

    text_prefix: bool = False
    """Whether the model lies under `model.language_model.`."""
    split_experts: bool = True
    """Whether each expert has tensors of its own."""
    split_mtp: bool = True
    """The same of the head for multi-token prediction, which may differ there."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Names on disk of parts that do not have the name of this form there."""
    joined: Mapping[str, tuple[DiskPart, ...]] = field(default_factory=dict)
    """Parts of tensors, by their name in this form, that transformers joins from several tensors there."""

    @staticmethod
    def of(names: Iterable[str]) -> "DiskNames":
        """Read the form off the names of a checkpoint."""
        names = tuple(names)
        text = any(name.startswith((_TEXT, _TEXT_BASE)) for name in names)
        joined = any(name.startswith(_MTP) and _EXPERTS.fullmatch(name) for name in names)
        return DiskNames(text, any(_ONE_EXPERT.fullmatch(name) for name in names), not joined)

    def in_classes(self, name: str) -> tuple[str, ...]:
        """Return a live name in the class of the checkpoint and, of a vision-language one, in that of its text part."""
        own = self._moved(name)
        return (own, _BASE + own.removeprefix(_TEXT)) if own.startswith(_TEXT) else (own,)

    def parts(self, name: str, shape: Sequence[int]) -> tuple[DiskPart, ...]:
        """Return the tensors on disk that a live tensor of this shape is made of."""
        parts = self._parts(self._moved(name), shape)
        return tuple(replace(p, name=self.others.get(p.name, p.name)) for p in parts) if self.others else parts

    def _moved(self, name: str) -> str:
        moved = self.text_prefix and name.startswith(_BASE) and not name.startswith((_TEXT, _TOWER))
        return _TEXT + name.removeprefix(_BASE) if moved else name

    def _parts(self, disk: str, shape: Sequence[int]) -> tuple[DiskPart, ...]:
        if disk in self.joined:
            return self.joined[disk]
        experts = _EXPERTS.fullmatch(disk)
        split = self.split_mtp if disk.startswith(_MTP) else self.split_experts
        if experts is None or not split:
            return (DiskPart(disk),)
        before, projection = experts.groups()
        if projection == "down_proj":
            return tuple(DiskPart(f"{before}{e}.down_proj.weight", (e,)) for e in range(shape[0]))
        half = shape[1] // 2
        halves = (("gate_proj", slice(0, half)), ("up_proj", slice(half, 2 * half)))
        return tuple(
            DiskPart(f"{before}{e}.{part}.weight", (e, rows)) for e in range(shape[0]) for part, rows in halves
        )

    def split(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield views of a live tensor under their names on disk."""
        for part in self.parts(name, tensor.shape):
            yield part.name, tensor[part.index] if part.index else tensor

    def reads(self, name: str, shape: Sequence[int], rows: slice) -> Iterator["DiskRead"]:
        """Yield the reads that give these rows (dimension 0) of a live tensor of this shape; nothing for no rows."""
        if rows.start == rows.stop:
            return
        for part in self.parts(name, shape):
            if not part.index:
                yield DiskRead(part.name, rows)
            elif part.index[0] == slice(None):  # other parts lie beside it in each row
                yield DiskRead(part.name, rows, part.index)
            elif isinstance(part.index[0], slice):
                own = part.index[0]
                first, last = max(rows.start, own.start), min(rows.stop, own.stop)
                if first < last:
                    here = slice(first - rows.start, last - rows.start)
                    yield DiskRead(part.name, slice(first - own.start, last - own.start), (here,))
            elif rows.start <= part.index[0] < rows.stop:
                yield DiskRead(part.name, None, (part.index[0] - rows.start, *part.index[1:]))


def names_in(checkpoint: Mapping[str, Any], model: Any, stock: Any) -> DiskNames:
    """Return the names in a checkpoint of what `model` holds, where transformers would read it into `stock`.

    `checkpoint`: by name, what has a `shape`.
    `stock` is the class that `from_pretrained` makes, `model` that or its text part; both may be empty. A tied weight
    that is there under the name of its copy alone is read from that. ValueError for two tensors that are read as one.
    """
    form = DiskNames.of(checkpoint)
    live = model.state_dict()
    known = {part.name for name, tensor in live.items() for part in form.parts(name, tensor.shape)}
    others: dict[str, str] = {}
    joined: dict[str, dict[str, StockName]] = {}
    for name, stock_name in stock_names(stock, sorted(checkpoint.keys() - known)).items():
        key = stock_name.key
        key = key if key in live else _BASE + key.removeprefix(_TEXT) if key.startswith(_TEXT) else key
        if key not in live:
            continue
        if stock_name.operations and not (_EXPERTS.fullmatch(form._moved(key)) and _ONE_EXPERT.fullmatch(name)):
            joined.setdefault(key, {})[name] = stock_name
            continue
        experts, one = _EXPERTS.fullmatch(form._moved(key)), _ONE_EXPERT.fullmatch(name)
        own = experts[1] + one[1] if experts and one else form._moved(key)
        if own in checkpoint or own in others:
            raise ValueError(f"{name} and {others.get(own, own)} are both read as {key}: remove one of them")
        others[own] = name
    first: dict[Any, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        own, copy = (form._moved(one) for one in (first.setdefault(parameter, name), name))
        if own not in checkpoint and own not in others and (copy in checkpoint or copy in others):
            others[own] = others.get(copy, copy)
    parts = {
        form._moved(key): joined_parts(key, stock_name, live[key].shape, checkpoint)
        for key, stock_name in joined.items()
    }
    for own, found_parts in parts.items():
        if own in checkpoint:
            raise ValueError(f"{own} and {found_parts[0].name} are both read as {own}: remove one of them")
    return replace(form, others=others, joined=parts)


def joined_parts(
    key: str, pieces: Mapping[str, StockName], shape: Sequence[int], checkpoint: Mapping[str, Any]
) -> tuple[DiskPart, ...]:
    """Return the parts of a live tensor of this shape that transformers joins from these tensors of a checkpoint.

    Experts are stacked in the order of their numbers; gate and up, or several projections, lie one behind the other.
    ValueError for operations that are not known here.
    """
    how = {one.operations for one in pieces.values()}
    sources = sorted({one.source for one in pieces.values()})
    groups = [sorted((n for n, one in pieces.items() if one.source == i), key=_by_number) for i in sources]
    sizes = [checkpoint[group[0]].shape[0] for group in groups]
    rows = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
    if how == {_STACKED} or how == {(*_STACKED, ("Concatenate", 1))}:
        if any(len(group) != shape[0] for group in groups):
            raise ValueError(f"{key} has {shape[0]} experts, the checkpoint holds {[len(group) for group in groups]}")
        whole = how == {_STACKED}
        return tuple(
            DiskPart(group[expert], (expert,) if whole else (expert, part))
            for expert in range(shape[0])
            for group, part in zip(groups, rows, strict=True)
        )
    if how == {(("Concatenate", 0),)} and all(len(group) == 1 for group in groups):
        return tuple(DiskPart(name, (part,)) for (name,), part in zip(groups, rows, strict=True))
    if how == {(("Concatenate", 1),)} and all(len(group) == 1 for group in groups):
        ends = [*accumulate(checkpoint[name].shape[1] for (name,) in groups)]
        columns = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        return tuple(DiskPart(name, (slice(None), part)) for (name,), part in zip(groups, columns, strict=True))
    words = ", ".join(sorted(f"{name}({dim})" for operations in how for name, dim in operations))
    raise ValueError(f"{', '.join(sorted(pieces)[:3])} are read as {key} by {words}, which is not implemented here")


def _by_number(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


OWN_NAMES = DiskNames()
"""Names that transformers saves a module under that came from no directory."""
