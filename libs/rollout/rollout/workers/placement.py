"""The resources that a pool of samplers needs, and whether a cluster can ever give them: pure functions of numbers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field


class NoCapacity(ValueError):  # noqa: N818  what happened, in the words of a log
    """A cluster can't hold the workers; the text has the numbers."""


@dataclass(frozen=True)
class Demand:
    """A number of workers, each with all of its resources on one node, or in equal parts on several."""

    workers: int = 1
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Other resources by Ray's names, such as NPU or a mark that some nodes carry."""
    nodes: int = 1
    """Nodes that each worker spans, with an equal part of its resources on each."""

    def __post_init__(self) -> None:
        for name, count in {"workers": self.workers, "nodes": self.nodes}.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")
        for name, amount in {"cpus": self.cpus, "gpus": self.gpus, **self.resources}.items():
            if not 0 <= amount < float("inf"):
                raise ValueError(f"{name} must be at least 0 and finite, got {amount}")
        for name in ("CPU", "GPU"):
            if name in self.resources:
                raise ValueError(f"say {name.lower()}s in place of the resource {name}")
        if not self.bundle:
            raise ValueError("a worker needs something of a node, or Ray puts any number of them on one: say cpus")

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, or of its part on a node, by Ray's names."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount / self.nodes for name, amount in amounts.items() if amount > 0}

    @property
    def parts(self) -> int:
        """Number of the workers' parts, each on one node."""
        return self.workers * self.nodes


def room(demand: Demand, nodes: Sequence[Mapping[str, float]]) -> int:
    """Count how many of the workers' parts fit on nodes with these resources."""
    bundle = demand.bundle
    return sum(int(min(node.get(name, 0.0) / amount + 1e-9 for name, amount in bundle.items())) for node in nodes)


def nodes_apart(
    demand: Demand, nodes: Mapping[str, Mapping[str, float]], own: Collection[str], count: int
) -> tuple[str, ...]:
    """Return the `count` nodes besides `own`, which train, for the workers: those with the most resources for them.

    `nodes`: resources of each, by its id.

    Raises:
        ValueError: they are more than the workers.
        NoCapacity: there are not so many, or they can't hold the workers.
    """
    if count > demand.parts:
        raise ValueError(f"{demand.workers} samplers can't fill {count} nodes: ask for as many nodes at most")
    others = sorted((name for name in nodes if name not in own), key=lambda name: -room(demand, [nodes[name]]))
    if len(others) < count:
        raise NoCapacity(
            f"a pool of {count} nodes apart from training's: the cluster has {len(others)} besides; add nodes "
            "to the Ray cluster, or let both share the present ones"
        )
    chosen = others[:count]
    why = refusal(demand, [nodes[name] for name in chosen])
    if why is not None:
        raise NoCapacity(f"apart from training's node, {why}")
    return tuple(chosen)


def refusal(demand: Demand, nodes: Sequence[Mapping[str, float]]) -> str | None:
    """Return why a cluster of these nodes can't hold the workers, with the numbers; None where it can.

    As all workers are alike, filling node after node places as many as possible.
    """
    places = room(demand, nodes)
    if places >= demand.parts:
        return None
    what = f"{demand.workers} samplers" if demand.nodes == 1 else f"{demand.parts} parts of {demand.workers} samplers"
    each = " and ".join(f"{amount:g} {name}" for name, amount in demand.bundle.items())
    has = "; ".join(
        ", ".join(f"{node.get(name, 0.0):g} {name}" for name in demand.bundle) + f" on node {i}"
        for i, node in enumerate(nodes)
    )
    return (
        f"{what} of {each} each find {places} places on {len(nodes)} nodes ({has or 'none'}): ask "
        "for fewer, or add nodes to the Ray cluster"
    )
