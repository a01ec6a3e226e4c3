"""Which devices Ray's samplers have, and what new weights reach them through: what the settings and a machine say."""

import os
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from apps.common.cluster import Cluster
from engines import EngineConfig
from engines.devices.detect import devices_of
from schedules.ray.cluster import RaySettings, Transport

VISIBLE = "CUDA_VISIBLE_DEVICES"
TRAINING_NODES = "TESSERA_TRAINING_NODES"
"""Variable with the ids of Ray's nodes that train, where Ray started the ranks (`--launch ray`)."""


class PlacedRun(Protocol):
    """The settings of a run that say which devices train and which sample."""

    @property
    def cluster(self) -> Cluster:
        """Pools and samplers."""

    @property
    def engine(self) -> EngineConfig:
        """What trains, and on which kind of device."""

    @property
    def nproc_per_node(self) -> int:
        """Ranks that train on a machine."""

    @property
    def threads(self) -> int:
        """CPU threads of a process."""


def cluster_address(config: PlacedRun) -> str | None:
    """Return HOST:PORT of the Ray cluster that a run joins; None where it starts one of its own."""
    return config.cluster.rollout.ray_address or os.environ.get("RAY_ADDRESS") or None


def ray_settings(config: PlacedRun, ranks: int) -> RaySettings | None:
    """Return the samplers that a run with so many training ranks has in a Ray cluster; None where it has none."""
    layout, pools = config.cluster.rollout, config.cluster.pools
    if not layout.ray_workers:
        return None
    variables = dict(entry.split("=", 1) for entry in config.cluster.env)
    variables |= {"OMP_NUM_THREADS": str(config.threads)}
    own = layout.backend.variables
    variables |= {name: os.environ[name] for name in own if name in os.environ}
    return RaySettings(
        layout.ray_workers,
        cpus=layout.ray_cpus,
        gpus=gpus_each(config),
        spans=layout.ray_nodes,
        address=cluster_address(config),
        devices=sampler_devices(config, ranks) if cluster_address(config) is None else None,
        transport=transport_of(config),
        shards=shards_through(config, ranks),
        nodes=pools.rollout_nodes if pools.placement == "separate" else None,
        training=tuple(filter(None, os.environ.get(TRAINING_NODES, "").split(","))),
        environment=variables,
    )


def samples_on_cuda(config: PlacedRun) -> bool:
    """Return whether samplers outside the trainer's process compute on CUDA devices: as training does, unless told."""
    return config.cluster.rollout.device != "cpu" and devices_of(config.engine.device).kind == "cuda"


def gpus_each(config: PlacedRun) -> float:
    """Return the number of CUDA devices of each of Ray's samplers."""
    layout = config.cluster.rollout
    if layout.ray_gpus is not None:
        return layout.ray_gpus
    return float(_spans(config)) if samples_on_cuda(config) else 0.0


def transport_of(config: PlacedRun) -> Transport:
    """Return what new weights pass through on their way to Ray's samplers.

    "auto" is NCCL where each of them has a whole CUDA device and the cluster is this machine's, on loopback. Beyond it
    nothing but the network's walls keeps strangers from a group's sockets: there it is used where somebody asks for it.
    """
    asked = config.cluster.rollout.weight_transport
    if asked == "objects" or asked == "gloo" or asked == "nccl":
        return asked
    here = (cluster_address(config) or "localhost").rpartition(":")[0] in ("", "127.0.0.1", "localhost")
    return "nccl" if here and samples_on_cuda(config) and gpus_each(config) >= 1 else "objects"


def shards_through(config: PlacedRun, ranks: int) -> Literal["gloo", "nccl"] | None:
    """Return what the ranks' shards pass through to Ray's samplers; None where the first rank passes the weights on.

    That is so without `--schedule.weight-sync shards`, with one rank, where somebody asks for the object store, and
    where ranks on other machines would not reach samplers that are on this one's loopback.
    """
    asked, nodes = config.cluster.rollout.weight_transport, config.cluster.pools.nodes
    alone = nodes > 1 and cluster_address(config) is None
    if config.cluster.schedule.weight_sync != "shards" or nodes * ranks < 2 or asked == "objects" or alone:
        return None
    if asked != "auto":
        return "nccl" if asked == "nccl" else "gloo"
    return "nccl" if samples_on_cuda(config) and gpus_each(config) >= 1 else "gloo"


def sampler_devices(config: PlacedRun, ranks: int) -> tuple[str, ...] | None:
    """Return the CUDA devices, as CUDA_VISIBLE_DEVICES names them, that a cluster of this machine has for samplers:
    those after the first `ranks`, which train. None where samplers compute elsewhere, and Ray may count as it likes."""
    return devices_left(_visible(), ranks) if samples_on_cuda(config) else None


def devices_left(visible: Sequence[str], ranks: int) -> tuple[str, ...]:
    """Return those that no rank trains on: rank i has the one in place i."""
    return tuple(visible[ranks:])


def check_ray_devices(config: PlacedRun, device: torch.device) -> None:
    """Refuse samplers that would find no device, or weights that could not reach them.

    Args:
        config: a run with Ray's samplers.
        device: that training's rank 0 is on.

    Raises:
        ValueError: with the setting to change, and the numbers where devices are too few.
    """
    layout = config.cluster.rollout
    beside = device.type == "npu" and layout.device == "cpu"  # shrink_npu_pools_test
    if device.type not in ("cpu", "cuda") and not beside:
        raise ValueError(
            f"--rollout.ray-workers on {device.type}: no test has run Ray's samplers there; set "
            "--trainer.device cpu, or beside NPUs --rollout.device cpu with engine vllm, or leave it at 0"
        )
    each = gpus_each(config)
    if not samples_on_cuda(config):
        if each:
            raise ValueError("--rollout.ray-gpus: these samplers compute on no CUDA device; leave it out")
        if layout.weight_transport == "nccl":
            raise ValueError(
                "--rollout.weight-transport nccl passes weights between CUDA devices, and these samplers "
                "compute on none: use auto, objects or gloo"
            )
        return
    if not each:
        raise ValueError("--rollout.ray-gpus 0: samplers on CUDA need a device, or a part of one, each")
    spans = _spans(config)
    if each < spans and spans > 1:
        raise ValueError(
            f"--rollout.ray-gpus {each:g}: each sampler's vLLM spans {spans} devices (tp x pp x dp over "
            f"copies-per-device): set it to {spans}, or leave it out"
        )
    if cluster_address(config) is None:
        _check_left(config, each)


def _check_left(config: PlacedRun, each: float) -> None:
    """Refuse more samplers than a cluster of this machine's has devices for."""
    workers, visible = config.cluster.rollout.ray_workers, _visible()
    left = devices_left(visible, config.nproc_per_node)
    if workers * each > len(left):
        raise ValueError(
            f"--rollout.ray-workers {workers} of {each:g} CUDA devices each need {workers * each:g}, and of "
            f"{len(visible)} here {min(config.nproc_per_node, len(visible))} train and {len(left)} are left: ask for "
            "fewer, or join a Ray cluster with more (--rollout.ray-address)"
        )


def _spans(config: PlacedRun) -> int:
    layout = config.cluster.rollout
    return layout.backend.devices(layout)


def _visible() -> tuple[str, ...]:
    """Return this process's CUDA devices by the names that CUDA_VISIBLE_DEVICES gives them."""
    said = os.environ.get(VISIBLE)
    return tuple(map(str, range(torch.cuda.device_count()))) if said is None else tuple(filter(None, said.split(",")))
