"""Ray cluster of a run: how it is found or started, and the pool of samplers that it gives."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from rollout.workers.placement import Demand
from rollout.workers.protocol import Workers
from rollout.workers.serve import Handler
from schedules.protocols import SamplerSource, Tasks
from schedules.runtime.collectives import rank_and_world
from schedules.sampling.sampler_process import StartProcess, Wait, generating_handlers, wait_until_ready
from schedules.sampling.settings import RolloutSettings

Transport = Literal["objects", "gloo", "nccl"]


@dataclass(frozen=True)
class RaySettings:
    """Samplers in actors of a Ray cluster: how many, with what, and how weights reach them."""

    workers: int
    cpus: float = 1.0
    """Processors that each has to itself."""
    gpus: float = 0.0
    """CUDA devices that each has to itself."""
    spans: int = 1
    """Nodes that each spans, with an equal part of both on each."""
    address: str | None = None
    """HOST:PORT of the cluster; None starts one on loopback that lives as long as the run."""
    devices: tuple[str, ...] | None = None
    """CUDA devices that a cluster which is started here hands out; None lets Ray count."""
    transport: Transport = "objects"
    shards: Literal["gloo", "nccl"] | None = None
    """What passes the ranks' shards straight to the samplers, in place of `transport`; None where none are sent."""
    nodes: int | None = None
    """Nodes of their own that the samplers are spread over; None packs them anywhere."""
    training: tuple[str, ...] = ()
    """Ids of nodes beside this process's that are no nodes of their own: they train."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the actors."""

    @property
    def demand(self) -> Demand:
        """What the samplers ask of the cluster."""
        return Demand(self.workers, self.cpus, self.gpus, nodes=self.spans)


def ray_module(name: str, flag: str = "--rollout.ray-workers") -> Any:
    """Return a module that needs ray, which is imported by name as other runs do without it; `flag` asks for it.

    Raises:
        ValueError: it is not there; the text says how to get it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{flag} needs ray ({error}): with Bazel, run //apps/grpo:ray or //apps/sft:ray, which bring it, or "
            "//apps/grpo:vllm, which brings vLLM too; else pip install 'tessera-rollout[ray]'"
        ) from error


@contextmanager
def in_cluster(settings: RaySettings | None) -> Iterator[None]:
    """Connect to the run's cluster while this is open; do nothing where it asks for none, or is connected already.

    A cluster that is started here lives on loopback, without a dashboard and without usage statistics.
    """
    if settings is None or rank_and_world()[0] > 0:  # the first rank has the samplers
        yield
        return
    ray = ray_module("ray")
    if ray.is_initialized():
        yield
        return
    local = ray_module("rollout.workers.ray_local")
    if settings.address is None:
        with paths_of_children(), local.local_ray(cuda=settings.devices):
            yield
        return
    local.connect(settings.address)
    try:
        yield
    finally:
        ray.shutdown()


def begin_pool(
    settings: RaySettings,
    target: Callable[..., Mapping[str, Handler]],
    args: tuple[Any, ...],
    stall_seconds: float,
) -> Workers:
    """Begin to start the samplers that the settings ask for, and return them; `target(*args)` makes their handlers. One
    that says nothing for `stall_seconds` counts as dead.

    Raises:
        ValueError: the cluster has no room for them; the text has the numbers.
    """
    module = ray_module("rollout.workers.ray_pool")
    pool: Workers = module.RayPool(
        target,
        args,
        settings.demand,
        strategy="PACK" if settings.nodes is None else "SPREAD",  # over all of the pool's nodes
        apart=settings.nodes,
        training=settings.training,
        environment={**settings.environment, "PYTHONPATH": import_paths()},
        transport=settings.transport,
        shards=settings.shards,
        stall_seconds=stall_seconds,
    )
    return pool


@dataclass(frozen=True)
class StartPool:
    """Starter of a fully asynchronous run's samplers in Ray's actors (`StartSampling`)."""

    ray: RaySettings
    source: SamplerSource
    tasks: Tasks
    settings: RolloutSettings

    @property
    def module_names(self) -> bool:
        """Whether they take weights under the names of the trained module."""
        return self.source.module_names

    def begin(self, version: int, place: Mapping[str, Any] | None) -> Workers:
        """Begin to start the pool, and return it; see `BeginSampling`."""
        given = (self.source, self.tasks, self.settings, version, place)
        return begin_pool(self.ray, generating_handlers, given, self.settings.stall_seconds)

    def __call__(self, version: int, place: Mapping[str, Any] | None, wait: Wait = wait) -> Workers:
        """Return the pool; see `StartSampling`."""
        return wait_until_ready(self.begin(version, place), wait)


def start_sampling(
    ray: RaySettings | None, source: SamplerSource, tasks: Tasks, settings: RolloutSettings
) -> StartProcess | StartPool:
    """Return the starter of a fully asynchronous run's samplers: Ray's actors, or one process."""
    return StartProcess(source, tasks, settings) if ray is None else StartPool(ray, source, tasks, settings)


def import_paths() -> str:
    """Return where this process imports from: whole, as Bazel and virtual environments say it in ways of their own."""
    return os.pathsep.join(path for path in sys.path if path)


@contextmanager
def paths_of_children() -> Iterator[None]:
    """Let processes that are started inside, Ray's daemons among them, import from where this one does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = import_paths()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
