"""The training ranks as a grid over tensor, context, data and pipeline parallelism.

Rank numbers run as in Megatron: tensor parallelism fastest, then context, data, and pipeline slowest. The expert layers
of a pipeline stage see the same ranks as another grid: expert tensor, expert, expert data parallelism.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

Axis = Literal["tp", "cp", "dp", "pp", "etp", "ep", "edp"]
DENSE: tuple[Axis, ...] = ("tp", "cp", "dp", "pp")
EXPERT: tuple[Axis, ...] = ("etp", "ep", "edp", "pp")


@dataclass(frozen=True)
class Grid:
    """Sizes of all axes; tp x cp x dp x pp = etp x ep x edp x pp = the number of ranks."""

    tp: int
    cp: int
    dp: int
    pp: int
    etp: int
    ep: int
    edp: int

    def __post_init__(self) -> None:
        if min(self.tp, self.cp, self.dp, self.pp, self.etp, self.ep, self.edp) < 1:
            raise ValueError(f"every axis has at least one rank, got {self}")
        if self.tp * self.cp * self.dp != self.etp * self.ep * self.edp:
            raise ValueError(f"both grids of a pipeline stage must have the same ranks, got {self}")

    @property
    def ranks(self) -> int:
        """Number of training ranks."""
        return self.tp * self.cp * self.dp * self.pp

    def size(self, axis: Axis) -> int:
        """Return the number of ranks in a group along an axis."""
        return int(getattr(self, axis))

    def cell(self, rank: int, axes: tuple[Axis, ...] = DENSE) -> dict[Axis, int]:
        """Return the coordinates of a rank in the dense grid or, with `EXPERT`, in that of the experts."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of the {self.ranks}")
        cell: dict[Axis, int] = {}
        for axis in axes:
            rank, cell[axis] = divmod(rank, self.size(axis))
        return cell

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Return the groups of ranks that differ along `axis` alone, each in order of that axis."""
        axes = DENSE if axis in DENSE else EXPERT
        stride = prod(self.size(other) for other in axes[: axes.index(axis)])
        starts = [rank for rank in range(self.ranks) if self.cell(rank, axes)[axis] == 0]
        return [tuple(start + stride * i for i in range(self.size(axis))) for start in starts]


def make_grid(ranks: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> Grid:
    """Make a grid with the data-parallel sizes that follow.

    Raises:
        ValueError: the sizes do not divide the ranks: all that `grid_problems` finds.
    """
    problems = grid_problems(ranks, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)
    if problems:
        raise ValueError("; ".join(problems))
    stage = ranks // pp
    return Grid(tp, cp, stage // (tp * cp), pp, etp, ep, stage // (etp * ep))


def grid_problems(ranks: int, *, tp: int = 1, cp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1) -> list[str]:
    """Return the sizes that do not divide the ranks, each with ones that do; [] where a grid can be made."""
    stage, rest = divmod(ranks, pp)
    model, problems = tp * cp * pp, []
    if ranks % model:
        sizes = f"tp x cp x pp = {tp} x {cp} x {pp} = {model}" if tp * cp > 1 else f"pp = {pp}"
        flags = {"--parallel.tensor": tp, "--parallel.context": cp, "--parallel.pipeline": pp}
        wrong = ", ".join(flag for flag, size in flags.items() if size > 1)
        problems.append(
            f"{ranks} ranks are no multiple of {sizes}: use {_near(ranks, model)} ranks (--nproc-per-node, "
            f"--pools.nodes), or smaller sizes ({wrong})"
        )
    if not rest and stage % (etp * ep):
        fitting = [size for size in range(1, stage + 1) if stage % (size * etp) == 0]
        fix = f"ep to one of {fitting}" if fitting else f"etp to a divisor of {stage}, and ep with it"
        problems.append(
            f"the {stage} ranks of a pipeline stage are no multiple of ep x etp = {ep} x {etp} = {ep * etp} "
            f"(--parallel.expert, --parallel.expert-tensor): lower {fix}"
        )
    return problems


def _near(ranks: int, multiple: int) -> str:
    below = ranks // multiple * multiple
    return f"{below} or {below + multiple}" if below else str(multiple)
