"""Which machines of a Ray cluster train, so that the samplers find room too: pure functions of numbers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rollout.workers.placement import Demand, NoCapacity, nodes_apart, refusal, room

Nodes = Mapping[str, Mapping[str, float]]
"""Resources of the machines by Ray's names, by an id."""


@dataclass(frozen=True)
class RankDemand:
    """Training ranks: alike on each of some machines, a processor or more and at most one device each."""

    machines: int
    ranks: int
    """Ranks of a machine."""
    cpus: float = 1.0
    device: str | None = None
    """Ray's name of the device that each rank has to itself: GPU or NPU; None: ranks compute on processors."""

    def of(self, ranks: int) -> Demand:
        """Return what so many ranks of a machine need."""
        gpus = float(ranks) if self.device == "GPU" else 0.0
        others = {} if self.device in (None, "GPU") else {str(self.device): float(ranks)}
        return Demand(1, ranks * self.cpus, gpus, others)

    @property
    def machine(self) -> Demand:
        """What one machine gives."""
        return self.of(self.ranks)


def training_machines(
    demand: RankDemand, samplers: Demand | None, apart: int | None, nodes: Nodes, own: str
) -> tuple[str, ...]:
    """Return the ids of the machines for the ranks: those that leave the samplers the most room, `own` first.

    Args:
        demand: the training ranks.
        samplers: samplers in actors of the same cluster; None where there are none.
        apart: machines of their own for the samplers; None where they share those of training.
        nodes: the cluster.
        own: id of the machine of the command, which trains where nothing speaks against it.

    Raises:
        NoCapacity: the cluster can't hold ranks and samplers; the text has the numbers.
    """
    fit = sorted((name for name in nodes if room(demand.machine, [nodes[name]])), key=lambda name: name != own)
    if len(fit) < demand.machines:
        raise NoCapacity(_lacks(demand, len(fit), nodes))
    if samplers is None:
        return tuple(fit[: demand.machines])
    chosen = sorted(fit, key=lambda name: _taken(demand, samplers, apart, nodes[name]))[: demand.machines]
    if apart is not None:
        nodes_apart(samplers, nodes, chosen, apart)
    elif why := refusal(samplers, [_left(demand, nodes[name]) if name in chosen else nodes[name] for name in nodes]):
        ranks = demand.machines * demand.ranks
        raise NoCapacity(f"beside {ranks} ranks of {_amounts(demand.of(1))} each, {why}")
    return tuple(sorted(chosen, key=lambda name: name != own))


def _taken(demand: RankDemand, samplers: Demand, apart: int | None, node: Mapping[str, float]) -> int:
    """Return how many samplers the ranks of a machine drive away."""
    return room(samplers, [node]) - (0 if apart is not None else room(samplers, [_left(demand, node)]))


def _left(demand: RankDemand, node: Mapping[str, float]) -> dict[str, float]:
    taken = demand.machine.bundle
    return {name: amount - taken.get(name, 0.0) for name, amount in node.items()}


def _amounts(demand: Demand) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in demand.bundle.items())


def _lacks(demand: RankDemand, fit: int, nodes: Nodes) -> str:
    names: Collection[str] = demand.machine.bundle
    has = "; ".join(", ".join(f"{node.get(name, 0.0):g} {name}" for name in names) for node in nodes.values())
    return (
        f"{demand.machines} machines of {demand.ranks} ranks need {_amounts(demand.machine)} each, and {fit} of the "
        f"Ray cluster's {len(nodes)} machines have that ({has or 'none'}): ask for less (--nproc-per-node, "
        "--pools.nodes, --threads), or add machines to the cluster"
    )
