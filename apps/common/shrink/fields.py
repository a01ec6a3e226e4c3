"""The settings that may differ in a shrunk run, and their values; all others stay as they are.

1. Sizes (tokens, rows, steps) become small; those that are bound to each other keep their ratio.
2. Sizes of parallelism above one become two, so that none is left out; the ranks follow from them.
3. The device becomes the CPU (an NPU stays one, by a stand-in: `apps.common.shrink.npu`; vLLM beside it samples on
   the CPU), and settings of a device's memory or graphs get their defaults.

Invariants, tested over all recipes: only fields that a `Change` names differ; what was above one stays above one (data
parallelism as far as the processes go); a shrunk recipe shrinks to itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from apps.common.cli.flags import changed, flag
from apps.common.cli.values import value_at as value_at
from apps.common.cli.values import with_values as with_values
from apps.common.cluster import Cluster, RolloutLayout
from engines import EngineConfig
from engines.config import parse_context_parallel
from engines.parallel.configured_layout import shards_of

C = TypeVar("C")
Kind = Literal["size", "ranks", "device", "flag"]
RANKS = 8
"""Processes of a shrunk run, at most, but where two ranks of each parallelism are more."""
MANY = 64
"""More processes than two ranks of each parallelism need: for what is only planned."""


@dataclass(frozen=True)
class ProcessLimit:
    """A limit of the processes of a shrunk run: `ranks`; without it `RANKS`, or as many as it needs."""

    ranks: int | None = None
    machines: int | None = None
    """Machines on which torchrun has started exactly so many ranks; None: the run starts its own, on this one."""


@dataclass(frozen=True)
class Change:
    """A field of a shrunk run that gets another value: its dotted path, the kind of difference, and the value."""

    path: str
    kind: Kind
    value: Any


@dataclass(frozen=True)
class Difference:
    """A field that differs."""

    path: str
    kind: Kind
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.kind:<7}{flag(self.path)}  {self.before} -> {self.after}"


def apply_changes(config: C, changes: Sequence[Change]) -> tuple[C, tuple[Difference, ...]]:
    """Return the configuration with all changes made at once, and the differences that they made."""
    differences = tuple(
        Difference(change.path, change.kind, before, change.value)
        for change in changes
        if (before := value_at(config, change.path)) != change.value
    )
    return with_values(config, {difference.path: difference.after for difference in differences}), differences


def by_flag(config: Any, recipe: Any) -> tuple[Difference, ...]:
    """Return the fields that flags changed before the run is shrunk, without `run_dir`."""
    paths = [path for path in changed(config, recipe) if path != "run_dir"]
    return tuple(Difference(path, "flag", value_at(recipe, path), value_at(config, path)) for path in paths)


@dataclass(frozen=True)
class ShrunkLayout:
    """The layout of a shrunk run: sizes of parallelism, ranks, and the tokens of a rank's micro-batch."""

    sizes: dict[str, Any]
    """Fields of `EngineConfig`."""
    ranks: int
    stages: int
    tokens: int
    machines: int = 1

    @staticmethod
    def of(engine: EngineConfig, ranks: int, longest: int, short: int, most: ProcessLimit) -> "ShrunkLayout":
        """Return the layout for a run of `ranks` ranks whose longest sequence of `longest` tokens becomes one of
        `short`.

        Raises:
            ValueError: `most.ranks` are too few for two ranks of each parallelism, or the run's own are; or torchrun
                has started others.
        """
        most_ranks = most.ranks or RANKS
        if most.ranks is None and not _fits(engine, ranks, longest, short, RANKS):
            more = range(RANKS + 1, MANY + 1)
            most_ranks = next((n for n in more if _fits(engine, ranks, longest, short, n)), RANKS)
        small = ShrunkLayout.layout(engine, ranks, longest, short, most_ranks)
        if most.machines is not None and small.ranks != most.ranks:
            raise ValueError(
                f"torchrun started {most.ranks} ranks, and the shrunk run has {small.ranks}: start as many on its "
                f"{most.machines} machines"
            )
        if small.ranks > most_ranks:
            raise ValueError(
                f"two ranks of each parallelism are {small.ranks} processes: allow them by --shrink={small.ranks}"
            )
        if not small.holds_experts:
            raise ValueError(
                f"{small.ranks} processes leave {small.ranks // small.stages} a stage, too few for two ranks of each "
                f"parallelism of experts: {_room_for_experts(engine, ranks, longest, short, most_ranks)}"
            )
        return replace(small, machines=most.machines or 1)

    @property
    def holds_experts(self) -> bool:
        """Whether the ranks of a stage can be divided among the experts and the ranks of each."""
        each = self.sizes["expert_parallel"] * self.sizes["expert_tensor_parallel"]
        return self.ranks // self.stages % int(each) == 0

    @staticmethod
    def layout(engine: EngineConfig, ranks: int, longest: int, short: int, most_ranks: int) -> "ShrunkLayout":
        """Return the same layout as `of` without a check that it can be run."""
        sizes: dict[str, Any] = {name: min(2, getattr(engine, name)) for name in _PARALLEL}
        sizes["pipeline_parallel"] = stages = _stages(engine)
        sizes |= {f"{end}_stage_layers": 1 for end in ("first", "last") if getattr(engine, f"{end}_stage_layers")}
        copy, copies = sizes["tensor_parallel"] * stages, engine.tensor_parallel * engine.pipeline_parallel
        tokens = -(-short * engine.max_tokens_per_rank // longest)
        shared = parse_context_parallel(engine.context_parallel)
        spread = _spread(engine, ranks, sizes)
        if shared == "dynamic":  # as many ranks as the longest sequence takes, and at least two
            together = min(max(2, -(-short // tokens)), max(2, most_ranks // copy), max(1, ranks // copies))
            together = -(-together // spread) * spread
            dp = 1
        else:
            together = min(2, shared)
            sizes |= {"context_parallel": f"static:{together}"} if shared > 1 else {}
            dp = 2 if ranks >= 2 * copies * shared and most_ranks >= 2 * copy * together else 1
            dp = max(dp, spread // together)
        small = copy * together * dp
        return ShrunkLayout(sizes, small, stages, max(tokens, -(-short // together)))


def engine_changes(small: ShrunkLayout, engine: EngineConfig, cluster: Cluster) -> list[Change]:
    """Return the changes of the ranks and the engine of a run."""
    return [
        Change("nproc_per_node", "ranks", small.ranks // small.machines),
        Change("cluster.pools.nodes", "ranks", small.machines),
        Change("engine.device", "device", "npu" if engine.device == "npu" else "cpu"),
        Change("engine.max_tokens_per_rank", "size", small.tokens),
        *(Change(f"engine.{name}", "ranks", value) for name, value in small.sizes.items()),
        *_cluster_changes(cluster),
        Change("cluster.rollout.device", "device", cluster.sampler.shrunk_device(engine, cluster.rollout)),
    ]


def steps_changes(engine: EngineConfig, steps: int) -> list[Change]:
    """Return the changes of a learning rate schedule that is cut to `steps` steps."""
    changes = [Change("engine.warmup_steps", "size", min(1, engine.warmup_steps))]
    if engine.total_steps is not None:
        changes.append(Change("engine.total_steps", "size", min(steps, engine.total_steps)))
    return changes


_PARALLEL = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
)


def _spread(engine: EngineConfig, ranks: int, sizes: dict[str, Any]) -> int:
    """Return the ranks that hybrid sharding needs: two shards of two copies, where there are several; 1 without it."""
    if engine.shard_ranks is None:
        return 1
    sizes["shard_ranks"] = shards = min(2, shards_of(engine, ranks))
    return shards * min(2, ranks // engine.shard_ranks)


def _room_for_experts(engine: EngineConfig, ranks: int, longest: int, short: int, most_ranks: int) -> str:
    """Return what would give a stage enough ranks for its experts: more processes, or a run with more ranks."""
    for most in range(most_ranks + 1, MANY + 1):
        if _fits(engine, ranks, longest, short, most):
            return f"allow more by --shrink={most}"
    leave = "leave out --parallel.expert or --parallel.expert-tensor"
    enough = next((n * ranks for n in (2, 4, 8) if _fits(engine, n * ranks, longest, short, MANY)), None)
    if enough is None:
        return f"no --shrink allows more, {leave}"
    return (
        f"the run's own {ranks} ranks are the limit, not --shrink: plan it for {enough} (--nproc-per-node, "
        f"--pools.nodes), or {leave}"
    )


def _fits(engine: EngineConfig, ranks: int, longest: int, short: int, most_ranks: int) -> bool:
    small = ShrunkLayout.layout(engine, ranks, longest, short, most_ranks)
    return small.ranks <= most_ranks and small.holds_experts


def _stages(engine: EngineConfig) -> int:
    """Return two, or as many stages as leave one between a first and a last one of their own sizes."""
    own = (engine.first_stage_layers is not None) + (engine.last_stage_layers is not None)
    return min(engine.pipeline_parallel, max(2, 1 + own))


def _cluster_changes(cluster: Cluster) -> list[Change]:
    pools, rollout = cluster.pools, cluster.rollout
    tp, dp, ray_nodes = min(2, rollout.tp), min(2, rollout.dp), min(2, rollout.ray_nodes)
    return [
        Change("cluster.pools.rollout_nodes", "ranks", min(ray_nodes, pools.rollout_nodes)),
        Change("cluster.pools.device_memory_gib", "device", None),
        Change("cluster.rollout.ray_workers", "ranks", min(2, rollout.ray_workers)),
        Change("cluster.rollout.ray_gpus", "device", None),
        Change("cluster.rollout.ray_nodes", "ranks", ray_nodes),
        Change("cluster.rollout.weight_transport", "device", "auto"),
        Change("cluster.rollout.tp", "ranks", tp),
        Change("cluster.rollout.pp", "ranks", min(2, rollout.pp)),
        Change("cluster.rollout.dp", "ranks", dp),
        Change("cluster.rollout.ep", "ranks", _spread_experts(rollout, tp, dp)),
        Change("cluster.rollout.memory_share", "device", 0.0),
        Change("cluster.rollout.copies_per_device", "device", 1),
        Change("cluster.rollout.weights_on_device", "device", False),
        Change("cluster.rollout.sleep", "device", False),
        Change("cluster.rollout.cuda_graph_sizes", "device", None),
    ]


def _spread_experts(rollout: RolloutLayout, tp: int, dp: int) -> int:
    """Return how many workers share the experts: those of one copy, of all copies, or 1, as in the whole run."""
    if rollout.ep == 1:
        return 1
    return tp if rollout.ep == rollout.tp else tp * dp
