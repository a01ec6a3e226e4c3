"""`--launch ray`: all ranks of a run as actors of a Ray cluster, from one command.

1. Each training machine is a bundle of a placement group, on a machine of its own; what the cluster does not have is
   refused with the numbers before a rank starts.
2. Each rank is a process with torchrun's variables and the run's secret, so that its code knows nothing of Ray; an
   actor starts it and forwards its lines. Samplers of the run (`--rollout.ray-workers`) join the same cluster.
3. SIGINT and SIGTERM go to all ranks. One that fails ends the others, and its status is this command's.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from apps.common.launch.flag import LAUNCH, RAY
from apps.common.launch.machines import RankDemand, training_machines
from apps.common.launch.monitor import RankMonitor
from apps.common.launch.rank_actor import Place, RankActor
from apps.common.ray_devices import TRAINING_NODES, PlacedRun, cluster_address, ray_settings
from apps.common.run.run_dir import check_run_dir, new_run_dir
from rollout.workers.authentication import SECRET, make_secret
from rollout.workers.placement import NoCapacity
from schedules.ray.cluster import import_paths, paths_of_children, ray_module

PATIENCE = 60.0
"""Seconds for resources that others hold."""
STORE_SECONDS = 300.0
"""That ranks wait for one another when they meet."""
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
_DEVICES = {"cuda": "GPU", "npu": "NPU", "cpu": None}


class LaunchedRun(PlacedRun, Protocol):
    """The settings of a run that say how its ranks start."""

    @property
    def recipe(self) -> str:
        """Name of its recipe."""

    @property
    def run_dir(self) -> Path | None:
        """Its folder."""

    @property
    def resume(self) -> bool:
        """Whether it goes on with an earlier run."""


def launch_ranks(app: str, argv: Sequence[str], config: LaunchedRun, runs: Path) -> None:
    """Run a command line on all ranks of its configuration, and end this process with their exit status.

    Args:
        app: "grpo" or "sft".
        argv: the command line without `--launch`.
        config: what it asks for.
        runs: where new runs are.

    Raises:
        ValueError: there is no ray, or the cluster can't hold the ranks; nothing has begun then.
        SystemExit: a rank has failed.
    """
    module = f"{__name__.partition('common.')[0]}{app}.main"
    run_dir = check_run_dir(config.run_dir, runs, config.resume) or new_run_dir(runs, config.recipe)
    words = [module, *argv, *([] if config.run_dir else ["--run-dir", str(run_dir)])]
    with _cluster(config) as ray:
        nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        demand, training = _training(config, nodes, ray.get_runtime_context().get_node_id())
        with _placed(ray, demand, training) as group:
            status = _run(ray, group, config, demand, [nodes[name] for name in training], words)
    if status:
        raise SystemExit(status)


@contextmanager
def _cluster(config: LaunchedRun) -> Iterator[Any]:
    """Connect to the run's cluster, or start one on loopback for as long as the run; yield the module ray."""
    ray, local = (ray_module(name, f"{LAUNCH} {RAY}") for name in ("ray", "rollout.workers.ray_local"))
    address = cluster_address(config)
    if address is None:
        small = None if config.cluster.rollout.ray_workers else local.SMALL_STORE
        with paths_of_children(), local.local_ray(store_bytes=small):
            yield ray
        return
    local.connect(address)
    try:
        yield ray
    finally:
        ray.shutdown()


def _training(config: LaunchedRun, nodes: Mapping[str, Any], own: str) -> tuple[RankDemand, tuple[str, ...]]:
    """Return what the ranks need, and the ids of the machines that train, this one first where it is among them."""
    resources = {name: node["Resources"] for name, node in nodes.items()}
    kind = config.engine.device
    if kind == "auto":
        kind = "cuda" if any(node.get("GPU") for node in resources.values()) else "cpu"
    ranks, machines = config.nproc_per_node, config.cluster.pools.nodes
    demand = RankDemand(machines, ranks, float(config.threads), _DEVICES[kind])
    there: Any = replace(config, engine=replace(config.engine, device=kind))  # type: ignore[type-var]
    settings = ray_settings(there, ranks)
    if settings is None:
        return demand, training_machines(demand, None, None, resources, own)
    return demand, training_machines(demand, settings.demand, settings.nodes, resources, own)


@contextmanager
def _placed(ray: Any, demand: RankDemand, training: Sequence[str]) -> Iterator[Any]:
    """Yield a placement group with a bundle for each machine, in order."""
    groups = ray_module("ray.util.placement_group", f"{LAUNCH} {RAY}")
    bundle = demand.machine.bundle
    group = groups.placement_group(
        [bundle] * demand.machines,
        strategy="STRICT_PACK" if demand.machines == 1 else "STRICT_SPREAD",
        bundle_label_selector=[{"ray.io/node-id": name} for name in training],
    )
    try:
        if not group.wait(PATIENCE):
            free = ", ".join(f"{ray.available_resources().get(name, 0.0):g} {name}" for name in bundle)
            raise NoCapacity(
                f"{demand.machines} machines of {bundle} each found no place in {PATIENCE:g} s: the cluster has {free} "
                "left; end what holds the rest, or ask for less (--nproc-per-node, --pools.nodes)"
            )
        yield group
    finally:
        groups.remove_placement_group(group)


def _run(
    ray: Any, group: Any, config: LaunchedRun, demand: RankDemand, nodes: Sequence[Any], words: Sequence[str]
) -> int:
    """Start the ranks in the bundles of their machines, and return the exit status once they have ended."""
    actors = _actors(ray, group, demand, nodes)
    try:
        places = _places(ray, actors)
        port = ray.get(actors[0].serve_store.remote(STORE_SECONDS))
        given = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "OMP_NUM_THREADS": str(config.threads)}
        given |= dict(entry.split("=", 1) for entry in config.cluster.env)
        given[TRAINING_NODES] = ",".join(node["NodeID"] for node in nodes)
        given[SECRET] = _secret()  # by a call's argument: of an actor's own settings Ray writes logs
        variables = rank_variables(places, demand.ranks, port)
        folder = str(Path.cwd())
        starts = [
            actor.start.remote(words, {**own, **given}, folder) for actor, own in zip(actors, variables, strict=True)
        ]
        if refusals := list(dict.fromkeys(filter(None, ray.get(starts)))):
            raise ValueError("; ".join(refusals))
        for machine in range(demand.machines):
            place, first = places[machine * demand.ranks], machine * demand.ranks
            sys.stdout.write(f"ranks {first} to {first + demand.ranks - 1} on {place.host} ({place.address})\n")
        sys.stdout.flush()
        return RankMonitor(actors, places).until_end()
    finally:
        for actor in actors:
            ray.kill(actor)


def _secret() -> str:
    """Return the secret by which the ranks authenticate: this process's, else a new one."""
    own = {name: os.environ[name] for name in (SECRET,) if name in os.environ}
    make_secret(own)
    return own[SECRET]


def _actors(ray: Any, group: Any, demand: RankDemand, nodes: Sequence[Any]) -> list[Any]:
    scheduling = ray_module("ray.util.scheduling_strategies", f"{LAUNCH} {RAY}")
    kind = ray.remote(RankActor)
    others = {demand.device: 1.0} if demand.device not in (None, "GPU") else None
    return [
        kind.options(
            num_cpus=demand.cpus,
            num_gpus=float(demand.device == "GPU"),
            resources=others,
            max_restarts=0,
            max_concurrency=4,  # lines are read while a signal is sent
            scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=machine
            ),
            runtime_env={"env_vars": {"PYTHONPATH": import_paths()}},
        ).remote(node["NodeManagerAddress"])
        for machine, node in enumerate(nodes)
        for _ in range(demand.ranks)
    ]


def _places(ray: Any, actors: Sequence[Any]) -> list[Place]:
    """Return where the actors are.

    Raises:
        ValueError: one of them could not begin.
    """
    errors = ray_module("ray.exceptions", f"{LAUNCH} {RAY}")
    try:
        places: list[Place] = ray.get([actor.place.remote() for actor in actors])
    except errors.RayActorError as error:
        raise ValueError(
            f"the actor of a rank could not begin: {str(error).strip().splitlines()[-1]}; each machine of the cluster "
            "needs these programs, installed or at the same path"
        ) from error
    return places


def rank_variables(places: Sequence[Place], ranks: int, port: int) -> list[dict[str, str]]:
    """Return the variables that torchrun gives each rank, `ranks` of them on a machine; the ranks of a machine see its
    devices together, in the order of the ranks."""
    variables = []
    for rank, place in enumerate(places):
        machine, local = divmod(rank, ranks)
        beside = places[machine * ranks : (machine + 1) * ranks]
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": local,
            "GROUP_RANK": machine,
            "WORLD_SIZE": len(places),
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_PORT": port,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
        }
        own = {name: str(number) for name, number in numbers.items()}
        own |= {"MASTER_ADDR": places[0].address, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        own |= {name: ",".join(each.devices[name] for each in beside) for name in place.devices}
        if place.address.startswith("127."):
            own |= dict.fromkeys(_INTERFACES, "lo")
        variables.append(own)
    return variables
