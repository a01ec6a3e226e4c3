"""Live name <-> names on disk: which tensors of a checkpoint a tensor of the live model is made of.

Two things differ. The text model of a vision-language checkpoint lies under `model.language_model.` on disk and under
`model.` in memory, unless the vision-language model itself is trained. Experts that are one tensor in memory
(`experts.gate_up_proj` [E, 2 I, H], `experts.down_proj` [E, H, I]) may be three tensors an expert on disk
(`experts.0.gate_proj.weight` [I, H], ...). Which of them holds is read off the checkpoint that a model came from, and
an export goes back to the same form.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

_BASE, _TEXT, _TOWER = "model.", "model.language_model.", "model.visual."
_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
_ONE_EXPERT = re.compile(r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight")

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

    @staticmethod
    def of(names: Iterable[str]) -> "DiskNames":
        """Read the form off the names of a checkpoint."""
        names = tuple(names)
        text = any(name.startswith(_TEXT) for name in names)
        return DiskNames(text, any(_ONE_EXPERT.fullmatch(name) and name.startswith(_BASE) for name in names))

    def parts(self, name: str, shape: Sequence[int]) -> tuple[DiskPart, ...]:
        """Return the tensors on disk that a live tensor of this shape is made of."""
        moved = self.text_prefix and name.startswith(_BASE) and not name.startswith((_TEXT, _TOWER))
        disk = _TEXT + name.removeprefix(_BASE) if moved else name
        experts = _EXPERTS.fullmatch(disk)
        if experts is None or not self.split_experts:
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
            elif isinstance(part.index[0], int) and rows.start <= part.index[0] < rows.stop:
                yield DiskRead(part.name, None, (part.index[0] - rows.start, *part.index[1:]))


OWN_NAMES = DiskNames()
"""Names that transformers saves a module under that came from no directory."""
