"""Assembly of whole tensors from pieces, each of which is checked."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from rollout.errors import NotFiniteError
from rollout.sync.boxes import Box
from rollout.sync.manifest import TensorSpec
from rollout.sync.pieces import Piece, box_of

Allocate = Callable[[str, Tensor], Tensor]


class WeightAssembler:
    """Collector of the pieces of a known set of tensors, which it returns whole, or says what is wrong.

    `targets` maps each accepted name to the tensor it will replace; `aliases` maps a name to the one it shares storage
    with (tied weights): either will do. `optional` names (buffers) may be missing, and may hold infinities.
    `allocate(name, target)` returns the flat memory that a tensor is collected in; new memory by default.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        optional: Iterable[str] = (),
        allocate: Allocate | None = None,
    ) -> None:
        self._targets = targets
        self._aliases = aliases or {}
        self._optional = frozenset(optional)
        self._allocate = allocate or _new_memory
        self.staged: dict[str, Tensor] = {}
        """Flat tensors so far, by name."""
        self._filled: dict[str, list[tuple[int, int]]] = {}
        self._boxes: dict[str, list[Box]] = {}

    def check(self, spec: TensorSpec) -> None:
        """Raise ValueError for a tensor of unknown name, wrong shape or kind of type."""
        name = self._aliases.get(spec.name, spec.name)
        if name not in self._targets:
            raise ValueError(f"unknown weight {spec.name!r}: this model has no tensor of that name")
        target = self._targets[name]
        if spec.shape != tuple(target.shape):
            raise ValueError(f"{spec.name}: shape {spec.shape} does not fit the model's {tuple(target.shape)}")
        if spec.dtype.is_floating_point != target.dtype.is_floating_point:
            raise ValueError(f"{spec.name}: {spec.dtype} cannot become {target.dtype}")

    def add(self, piece: Piece) -> None:
        """Check one piece and keep a copy of it.

        Raises ValueError for an unknown name, a wrong shape or type, bounds, NaN, or an infinity (also one that the
        model's type makes of a number too large for it).
        """
        self.check(TensorSpec(piece.name, tuple(piece.shape), piece.dtype))
        name = self._aliases.get(piece.name, piece.name)
        target = self._targets[name]
        if piece.flat.dtype != piece.dtype:
            raise ValueError(f"{piece.name}: {piece.flat.dtype} (said to be {piece.dtype})")
        end = piece.offset + piece.flat.numel()
        box = box_of(piece)
        if piece.offset < 0 or end > target.numel():
            raise ValueError(f"{piece.name}: elements {piece.offset}..{end} lie outside its {target.numel()}")
        if box is not None and not (box.fits(target.shape) and piece.offset == 0 and box.numel == end):
            raise ValueError(f"{piece.name}: {end} elements of {box} do not fit its {tuple(target.shape)}")
        run = piece.flat.to(dtype=target.dtype)  # on its own device: a GPU checks it faster than the host
        if not is_good(run, infinities=name in self._optional):
            at = int((run.isnan() if name in self._optional else ~run.isfinite()).nonzero()[0])
            raise NotFiniteError(
                f"{piece.name}: element {piece.offset + at} is {float(piece.flat[at])} ({float(run[at])} as "
                f"{target.dtype}): weights that are not finite are not taken"
            )
        if piece.name not in self.staged:  # nothing is written before it is known to be good
            self.staged[piece.name] = self._allocate(piece.name, target)
            self._filled[piece.name], self._boxes[piece.name] = [], []
        if box is None:
            self.staged[piece.name][piece.offset : end].copy_(run)
            self._filled[piece.name].append((piece.offset, end))
        else:
            self.staged[piece.name].view(target.shape)[box.index].copy_(run.view(box.size))
            self._boxes[piece.name].append(box)

    def finish(self) -> dict[str, Tensor]:
        """Return all tensors by name, in the targets' shapes. Raise ValueError where any is missing, overlapping or
        contradictory."""
        whole: dict[str, Tensor] = {}
        for arrived, flat in self.staged.items():
            at = sum(box.numel for box in self._boxes[arrived])
            if at and self._filled[arrived]:
                raise ValueError(f"{arrived}: it arrived in runs and in boxes, which are not told apart")
            if (twice := _overlap(self._boxes[arrived])) is not None:
                raise ValueError(f"{arrived}: {twice} arrived twice")
            for start, end in sorted(self._filled[arrived]):
                if start != at:
                    what = "twice" if start < at else "never"
                    raise ValueError(f"{arrived}: elements {min(start, at)}..{max(start, at)} arrived {what}")
                at = end
            if at != flat.numel():
                raise ValueError(f"{arrived}: elements {at}..{flat.numel()} never arrived")
            name = self._aliases.get(arrived, arrived)
            if name in whole and not torch.equal(whole[name].reshape(-1), flat):
                raise ValueError(f"{arrived} is tied to {name}, but the two arrived with different values")
            whole[name] = flat.view(self._targets[name].shape)
        self.check_complete(whole)
        return whole

    def check_complete(self, names: Iterable[str]) -> None:
        """Raise ValueError unless these names, or those they are tied to, are all that must arrive."""
        missing = sorted(self._targets.keys() - {self._aliases.get(n, n) for n in names} - self._optional)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise ValueError(f"weights never arrived: {', '.join(missing[:3])}{more}")


def _overlap(boxes: list[Box]) -> Box | None:
    """Return what two of the boxes have in common, or None."""
    ordered = sorted(boxes)
    for number, box in enumerate(ordered):
        for other in ordered[number + 1 :]:
            if box.start and other.start[0] >= box.start[0] + box.size[0]:
                break  # nor has any that begins later
            if (both := box.overlap(other)) is not None:
                return both
    return None


def is_good(run: Tensor, infinities: bool) -> bool:
    """Return whether no element is NaN, nor infinite but where that is allowed. The extremes show it in one pass
    without memory of its own: both are NaN where any element is (on a CPU `isfinite` of bfloat16 takes fifty times as
    long)."""
    if not run.is_floating_point() or run.numel() == 0:
        return True
    extremes = torch.stack(torch.aminmax(run)).tolist()
    return not any(map(math.isnan, extremes)) if infinities else all(map(math.isfinite, extremes))


def _new_memory(name: str, target: Tensor) -> Tensor:
    del name
    return torch.empty(target.numel(), dtype=target.dtype, device=target.device)


def assemble(assembler: WeightAssembler, pieces: Iterable[Piece]) -> dict[str, Tensor]:
    """Return all tensors of a stream of pieces. The stream is read to its end before a ValueError about any piece is
    raised: it may be a collective export, in which the other ranks wait for this one."""
    problem: ValueError | None = None
    for piece in pieces:
        if problem is None:
            try:
                assembler.add(piece)
            except ValueError as error:
                problem = error
    if problem is not None:
        raise problem
    return assembler.finish()
