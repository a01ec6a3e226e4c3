"""What an adapter is made of."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on linear layers; the weights under them stay as they are.

    There is no dropout: an engine never applies any, so that the policy that is trained is the one that was scored.
    """

    rank: int = 0
    """Of the adapters; 0 trains the weights themselves."""
    alpha: float = 32.0
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Last names of the linear layers that have one, such as q_proj; by default all in the decoder layers."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023, arXiv 2312.03732)."""

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 0:
            raise ValueError(f"lora rank must be a whole number, at least 0, got {self.rank!r}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha must be a finite number above 0, got {self.alpha!r}")
        if not isinstance(self.targets, tuple) or not all(isinstance(t, str) and t for t in self.targets):
            raise ValueError(f"lora targets must be a tuple of names such as ('q_proj',), got {self.targets!r}")
        if not isinstance(self.rank_stabilized, bool):
            raise ValueError(f"lora rank_stabilized must be true or false, got {self.rank_stabilized!r}")
        if not self.rank:
            for name in ("alpha", "targets", "rank_stabilized"):
                if getattr(self, name) != getattr(LoraConfig, name):
                    raise ValueError(f"lora {name} has no effect without an adapter: set lora rank, such as 16")

    @property
    def scale(self) -> float:
        """What an adapter's output is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)
