"""Sizes and rank numbers of a run's ranks, without any process."""

from dataclasses import dataclass, fields
from typing import NamedTuple


class Coordinates(NamedTuple):
    """A rank's place in each dimension."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of data, context, tensor, pipeline and expert parallelism.

    Rank numbers run over tp fastest, then cp, dp, and pp slowest (Megatron's order): world size = dp * cp * tp * pp.
    Experts are spread over the ranks of a pipeline stage, `etp` fastest, then `ep`: etp ranks share the matrices of an
    expert, so ep * etp divides dp * cp * tp. The rows of a batch are split over the dp * cp ranks of a plan plane
    (`plan_ranks`), which is why nobody takes the world size for the number of data-parallel ranks. ValueError for a
    size below 1, or an ep * etp that does not divide.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{field.name} must be an integer of at least 1, got {size!r}")
        stage, experts = self.dp * self.cp * self.tp, self.ep * self.etp
        if stage % experts:
            sizes = f"ep={self.ep}" if self.etp == 1 else f"ep * etp = {self.ep} * {self.etp}"
            raise ValueError(f"{sizes} must divide dp * cp * tp = {stage}, the ranks of a pipeline stage")

    @classmethod
    def of_world(
        cls, world_size: int, *, cp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, etp: int = 1
    ) -> "ParallelLayout":
        """Make the layout of `world_size` ranks: dp follows from the others. ValueError where they do not divide it."""
        copy = cls(1, cp, tp, pp).world_size
        if world_size < 1 or world_size % copy:
            raise ValueError(
                f"cp={cp}, tp={tp} and pp={pp} need a multiple of {copy} ranks, this run has {world_size}: start "
                "another number of processes, or choose other sizes"
            )
        return cls(world_size // copy, cp, tp, pp, ep, etp)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def plan_size(self) -> int:
        """Number of ranks over which the rows of a batch are split."""
        return self.dp * self.cp

    def check_world(self, world_size: int) -> None:
        """Raise ValueError unless the run has as many ranks as the layout."""
        if world_size != self.world_size:
            raise ValueError(
                f"{self} is for {self.world_size} ranks, this run has {world_size}: start as many processes, or use "
                "ParallelLayout.of_world"
            )

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of `rank`; ValueError for a rank outside the layout."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of the {self.world_size} ranks of {self}")
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        pp, dp = divmod(rest, self.dp)
        return Coordinates(pp, dp, cp, tp)

    def rank_of(self, place: Coordinates) -> int:
        """Return the rank at `place`: the inverse of `coordinates`."""
        return ((place.pp * self.dp + place.dp) * self.cp + place.cp) * self.tp + place.tp

    def plan_index(self, rank: int) -> int:
        """Return this rank's number among those that split a batch: its part of the plan."""
        place = self.coordinates(rank)
        return place.dp * self.cp + place.cp

    def plan_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that split a batch with `rank` (same pp and tp), by plan index."""
        place = self.coordinates(rank)
        every = ((dp, cp) for dp in range(self.dp) for cp in range(self.cp))
        return tuple(self.rank_of(place._replace(dp=dp, cp=cp)) for dp, cp in every)

    def pipeline_ranks(self, rank: int) -> tuple[int, ...]:
        """Return the stages of the pipeline that `rank` is in, first to last."""
        place = self.coordinates(rank)
        return tuple(self.rank_of(place._replace(pp=pp)) for pp in range(self.pp))

    def is_last_stage(self, rank: int) -> bool:
        """Return whether losses and scores come out on this rank."""
        return self.coordinates(rank).pp == self.pp - 1
