"""The configuration of low-rank adapters."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on linear layers; the weights under them stay as they are.

    There is no dropout: an engine never applies any, so that the policy that is trained is the one that was scored.
    """

    rank: int = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: float = 32.0
    """Numerator of the adapters' scale alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last names of the linear layers with adapters, such as q_proj; by default all in the decoder layers."""
    target_parameters: tuple[str, ...] = ()
    """Stacked parameters with adapters beside those of `targets`, as peft's: `experts.gate_up_proj` and
    `experts.down_proj` are the routed experts, each with an adapter of its own."""
    rank_stabilized: bool = False
    """Whether the scale is alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv 2312.03732)."""

    def __post_init__(self) -> None:
        if problems := [*self.problems()]:
            raise ValueError("; ".join(f"lora {text}" for text in problems))

    def problems(self) -> Iterator[str]:
        """Yield the text of each problem, beginning with a field's name."""
        wrong = {name: text for name, holds, text in self._wanted() if not holds}
        for name, text in wrong.items():
            yield f"{name} must be {text}, got {getattr(self, name)!r}"
        for name in ("alpha", "targets", "target_parameters", "rank_stabilized"):
            if not self.rank and not {"rank", name} & set(wrong) and getattr(self, name) != getattr(LoraConfig, name):
                yield f"{name} has no effect without an adapter: set lora rank, such as 16"

    def _wanted(self) -> Iterator[tuple[str, bool, str]]:
        """Yield (field, whether its value is valid, what it must be)."""
        rank, alpha, targets = self.rank, self.alpha, self.targets
        whole = isinstance(rank, int) and not isinstance(rank, bool)
        yield "rank", whole and rank >= 0, "a whole number, at least 0"
        number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        yield "alpha", number and 0 < alpha < math.inf, "a finite number above 0"
        names = isinstance(targets, tuple) and all(isinstance(name, str) and name for name in targets)
        yield "targets", names, "a tuple of names such as ('q_proj',)"
        stacks = self.target_parameters
        names = isinstance(stacks, tuple) and all(isinstance(name, str) and name for name in stacks)
        yield "target_parameters", names, "a tuple of names such as ('experts.gate_up_proj',)"
        yield "rank_stabilized", isinstance(self.rank_stabilized, bool), "true or false"

    @property
    def scale(self) -> float:
        """The factor of an adapter's output."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
