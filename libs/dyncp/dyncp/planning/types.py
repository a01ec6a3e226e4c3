"""The plan of one optimizer step as data: frozen, JSON-able, hashed; the same on every rank because it is a function of
lengths."""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

from dyncp.planning.methods import Method
from dyncp.planning.sizes import Layout, ceil_div, check_layout, local_tokens


class Group(NamedTuple):
    """Consecutive ranks that together hold the packed samples; no samples means that the group runs a dummy."""

    ranks: tuple[int, ...]
    sample_ids: tuple[int, ...]

    @property
    def cp_size(self) -> int:
        """Number of ranks that share each sequence of this group."""
        return len(self.ranks)


class Step(NamedTuple):
    """One forward and backward of the whole world: every rank is in exactly one group."""

    groups: tuple[Group, ...]

    def group_of(self, rank: int) -> Group:
        """Return the group of this rank; ValueError for a rank outside the plan."""
        for group in self.groups:
            if rank in group.ranks:
                return group
        raise ValueError(f"rank {rank} is in no group of this step: it was planned for {self.world_size} ranks")

    @property
    def world_size(self) -> int:
        """Number of ranks the step was planned for."""
        return sum(len(group.ranks) for group in self.groups)


@dataclass(frozen=True)
class DynamicPlan:
    """Who computes which samples together, step by step, until one optimizer step is accumulated.

    lengths: tokens of each sample of the global batch. trained_tokens: how many of them are trained, over the whole
    batch: every rank divides its loss sum by this number, so the gradient is the same under any plan. align: each
    rank's tokens are padded to a multiple of it, which counts under the cap. seconds: predicted time of each step;
    lower_bound: predicted seconds that no plan of these lengths can beat under the same cost model, 0 where nobody
    computed it; name: the candidate that won, such as static-2, dynamic or exact (these three are not in the hash).
    """

    lengths: tuple[int, ...]
    world_size: int
    max_tokens_per_rank: int
    steps: tuple[Step, ...]
    layout: Layout = "contiguous"
    method: Method = "ring"
    trained_tokens: int = 0
    name: str = "dynamic"
    seconds: tuple[float, ...] = ()
    align: int = 1
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if self.align < 1:
            raise ValueError(f"align must be positive, got {self.align}")
        if self.trained_tokens == 0:
            object.__setattr__(self, "trained_tokens", sum(self.lengths))
        self._check_partition()
        self._check_samples()

    def _check_partition(self) -> None:
        for index, step in enumerate(self.steps):
            ranks = [rank for group in step.groups for rank in group.ranks]
            if ranks != list(range(self.world_size)):
                raise ValueError(
                    f"step {index} must hold ranks 0..{self.world_size - 1} once each, in order; got {ranks}"
                )

    def _check_samples(self) -> None:
        seen = sorted(sample for _, group in self.groups() for sample in group.sample_ids)
        if seen != list(range(len(self.lengths))):
            raise ValueError(
                f"every one of the {len(self.lengths)} samples must be planned exactly once; planned: {seen}"
            )
        for index, group in self.groups():
            tokens = self.tokens_per_rank(group)
            if tokens > self.max_tokens_per_rank:
                raise ValueError(
                    f"step {index}: ranks {group.ranks[0]}..{group.ranks[-1]} would hold {tokens} tokens each, "
                    f"the cap is {self.max_tokens_per_rank}"
                )

    def groups(self) -> Iterator[tuple[int, Group]]:
        """Return (step index, group) for every group of the plan, in order."""
        return ((index, group) for index, step in enumerate(self.steps) for group in step.groups)

    def tokens_per_rank(self, group: Group) -> int:
        """Return the tokens of each rank of the group, padding included."""
        return local_tokens([self.lengths[i] for i in group.sample_ids], group.cp_size, self.layout, self.align)

    def process_groups(self) -> tuple[tuple[int, ...], ...]:
        """Return the distinct sets of more than one rank, in the order in which every rank must create them."""
        return tuple(sorted({group.ranks for _, group in self.groups() if group.cp_size > 1}))

    def sample_order(self) -> tuple[int, ...]:
        """Return sample ids in the order of steps and groups."""
        return tuple(sample for _, group in self.groups() for sample in group.sample_ids)

    @property
    def gap(self) -> float:
        """Predicted seconds over `lower_bound`, minus one: 0.0 is proven optimal; infinite where there is no bound."""
        total = sum(self.seconds)
        if self.lower_bound <= 0:
            return 0.0 if total == 0 else math.inf
        return max(0.0, total / self.lower_bound - 1)

    @property
    def fill(self) -> float:
        """Share of the token slots (steps x world x cap) that hold real tokens."""
        slots = len(self.steps) * self.world_size * self.max_tokens_per_rank
        return sum(self.lengths) / slots if slots else 0.0

    def to_json(self) -> str:
        """Return the plan as JSON text; `from_json` gives an equal plan back."""
        return json.dumps(asdict(self) | {"hash": self.hash}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "DynamicPlan":
        """Return the plan that `to_json` wrote. ValueError for other text, or a plan changed by hand (by its hash)."""
        data: dict[str, Any] = json.loads(text)
        missing = {"lengths", "world_size", "max_tokens_per_rank", "steps"} - data.keys()
        if missing:
            raise ValueError(f"not a plan: {', '.join(sorted(missing))} missing")
        expected = data.pop("hash", None)
        steps = tuple(
            Step(tuple(Group(tuple(ranks), tuple(samples)) for ranks, samples in groups))
            for (groups,) in data.pop("steps")
        )
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        plan = cls(**values, steps=steps)
        if expected not in (None, plan.hash):
            raise ValueError(
                f"the plan's hash is {plan.hash}, the file says {expected}: it was changed after it was written"
            )
        return plan

    @cached_property
    def hash(self) -> str:
        """The hash, 16 hexadecimal digits, of all that ranks must agree on (without forecast, bound and name)."""
        facts = [self.lengths, self.world_size, self.max_tokens_per_rank, self.steps, self.layout, self.method]
        text = json.dumps([*facts, self.trained_tokens, self.align], separators=(",", ":"))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def seed_plan(lengths: tuple[int, ...], world_size: int, max_tokens_per_rank: int, cp_size: int) -> DynamicPlan:
    """Return the first published plan: groups of one size, equal consecutive slices, one sample a step and group.

    Any number of samples works: fewer than groups, not divisible, one. Groups that run out of samples run dummies.
    `dyncp.plan` is better; this is the simplest plan, a reference for tests.
    """
    if world_size % cp_size:
        raise ValueError(f"{world_size} ranks cannot be cut into groups of {cp_size}")
    count = world_size // cp_size
    per_group = ceil_div(len(lengths), count)
    slices = [range(len(lengths))[g * per_group : (g + 1) * per_group] for g in range(count)]
    ranks = [tuple(range(g * cp_size, (g + 1) * cp_size)) for g in range(count)]
    steps = tuple(
        Step(tuple(Group(ranks[g], tuple(slices[g][s : s + 1])) for g in range(count))) for s in range(per_group)
    )
    return DynamicPlan(tuple(lengths), world_size, max_tokens_per_rank, steps, name=f"seed-{cp_size}")
