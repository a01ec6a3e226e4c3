"""Samplers in actors of a Ray cluster: how a run finds the cluster, and plays its episodes there.

1. A step's tasks are dealt to the samplers in turn, one call each; a sampler plays its groups beside its engine and
   sends back episodes. Seeds come from tasks, so that the tokens are those of a run without Ray.
2. Weights go to all samplers or to none (`rollout.sync.transfer_weights`).
3. A sampler that dies ends the pool. Another pool gets the trainer's present weights, and the tasks that it was asked
   for begin again. Weights that were trained since the lost pool got its own have the number that the next hand-over
   would give them, and that hand-over has nothing to do.
"""

import asyncio
import importlib
import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from apps.common.run.interrupts import Runner
from apps.common.run.ranks import rank_and_world
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.ray_devices import cluster_address, devices_handed_out, gpus_each, transport_of
from apps.grpo.sampling.ray_follower import Order, told
from apps.grpo.sampling.sampler_process import generate, generating_handlers, sampling_handlers
from apps.grpo.sampling.session import Session, hand_over
from apps.grpo.sampling.vllm import Media, plain_shown
from apps.grpo.schedules.restarts import in_place_of
from apps.grpo.schedules.transfer_result import Handed
from apps.grpo.tasks.prompt_tasks import Tasks
from engines import TrainEngine
from rollout import Episode, Sampling, TaskRow
from rollout.episodes.codec import decode_episodes
from rollout.vllm.client.process import VARIABLE
from rollout.workers.placement import Demand
from rollout.workers.process import WorkerDied, WorkerProcess
from rollout.workers.protocol import Workers
from rollout.workers.serve import Handler

T = TypeVar("T")
Wait = Callable[["Sequence[Future[Any]]"], object]
"""Returns once all of them have ended."""
RESTARTS = 3
"""Pools that may die one after the other before a run gives up."""


def ray_module(name: str) -> Any:
    """Return a module that needs ray, which is imported by name as other runs do without it.

    Raises:
        ValueError: it is not there; the text says how to get it.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"--cluster.rollout.ray-workers needs ray ({error}): with Bazel, run //apps/grpo:ray, which brings it, or "
            "//apps/grpo:vllm, which brings vLLM too; else pip install 'tessera-rollout[ray]'"
        ) from error


@contextmanager
def in_cluster(config: GrpoConfig) -> Iterator[None]:
    """Be connected to the run's cluster; nothing where it asks for none. Who is connected already stays so.

    A cluster that is started here lives on loopback, without a dashboard and without usage statistics. Of this
    machine's CUDA devices it hands out those that no rank trains on.
    """
    layout = config.cluster.rollout
    if not layout.ray_workers or rank_and_world()[0] > 0:  # the first rank has the samplers
        yield
        return
    ray = ray_module("ray")
    if ray.is_initialized():
        yield
        return
    local = ray_module("rollout.workers.ray_local")
    address = cluster_address(config)
    if address is None:
        with paths_of_children(), local.local_ray(cuda=devices_handed_out(config, rank_and_world()[1])):
            yield
        return
    local.connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def open_pool(
    config: GrpoConfig, target: Callable[..., Mapping[str, Handler]], args: tuple[Any, ...], wait: Wait = wait
) -> Workers:
    """Return the samplers that a configuration asks for, once all of them have begun; `target(*args)` makes the
    handlers.

    `wait` waits for that.

    Raises:
        ValueError: the cluster has no room for them; the text has the numbers.
        WorkerDied: one of them could not begin.
    """
    layout = config.cluster.rollout
    variables = dict(entry.split("=", 1) for entry in config.cluster.environment)
    variables |= {"PYTHONPATH": _paths(), "OMP_NUM_THREADS": str(config.threads)}
    if VARIABLE in os.environ:
        variables[VARIABLE] = os.environ[VARIABLE]
    demand = Demand(layout.ray_workers, cpus=layout.ray_cpus, gpus=gpus_each(config))
    pools = config.cluster.pools
    apart = pools.rollout_nodes if pools.placement == "separate" else None
    module = ray_module("rollout.workers.ray_pool")
    strategy = "PACK" if apart is None else "SPREAD"  # over all of the pool's nodes
    pool: Workers = module.RayPool(
        target,
        args,
        demand,
        strategy=strategy,
        apart=apart,
        environment=variables,
        transport=transport_of(config),
    )
    begun = False
    try:
        wait([pool.ready])
        pool.ready.result()
        begun = True
    finally:
        if not begun:
            pool.close()
    return pool


def start_generating(
    config: GrpoConfig, tasks: Tasks, model: Path, version: int, place: Mapping[str, Any] | None, wait: Wait = wait
) -> Workers:
    """Return the sampling process of a fully asynchronous run, or its samplers in Ray's actors, once they have begun.

    The arguments are those of `generating_handlers`; `wait` waits for the beginning. WorkerDied: it ended, or one of
    them did, before it had begun.
    """
    arguments = (config, tasks, model, version, place)
    if config.cluster.rollout.ray_workers:
        return open_pool(config, generating_handlers, arguments, wait)
    worker = WorkerProcess(generate, arguments)
    begun = False
    try:
        wait([worker.ready])
        worker.ready.result()
        begun = True
    finally:
        if not begun:
            worker.close()
    return worker


class RaySamplers:
    """A pool that plays tasks, and is replaced when it dies; of rank 0, the others follow it. To be closed.

    `version`: the number that the weights in `model` count as.
    """

    def __init__(self, config: GrpoConfig, tasks: Tasks, model: Path, version: int) -> None:
        self._config, self._tasks, self._model = config, tasks, model
        self._engine: TrainEngine | None = None
        self._deaths = 0
        self._ahead: Handed | None = None  # the next hand-over, which a revived pool had already
        self.version = version
        self._pool = self._open(version)

    def __enter__(self) -> "RaySamplers":
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    async def played(
        self,
        rows: Sequence[TaskRow],
        places: Sequence[int],
        sampling: Sampling,
        size: int,
        heard: Callable[[int], None],
    ) -> list[list[Episode]]:
        """Return a group of `size` episodes of each row, under the numbers of `places`; `heard` is told how many came
        back.

        Raises:
            WorkerDied: a sampler did; see `revive`.
        """
        count = min(self._config.cluster.rollout.ray_workers, len(rows))

        async def part(first: int) -> list[list[Episode]]:
            asked = self._pool.call(
                "sample",
                rows=rows[first::count],
                places=list(places[first::count]),
                sampling=asdict(sampling),
                size=size,
            )
            _, payload = await asyncio.wrap_future(asked)
            episodes = decode_episodes(payload)
            heard(len(episodes))
            return [episodes[at : at + size] for at in range(0, len(episodes), size)]

        parts = await asyncio.gather(*map(part, range(count)), return_exceptions=True)
        for found in parts:
            if isinstance(found, BaseException):
                raise found
        self._deaths = 0
        dealt = cast(list[list[list[Episode]]], parts)
        return [dealt[at % count][at // count] for at in range(len(rows))]

    async def probed(self, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> list[dict[str, Any]]:
        """Return what each of the samplers answers to probes. WorkerDied: see `revive`."""
        asked = self._pool.call_all("probe", prompts=prompts, media=plain_shown(media))
        answers = await asyncio.gather(*map(asyncio.wrap_future, asked))
        return [head["answer"] for head, _ in answers]

    def take(self, engine: TrainEngine, runner: Runner) -> Handed:
        """Give all samplers the engine's present weights as the next version; the bytes handed over."""
        self._engine = engine
        if self._ahead is not None:
            handed, self._ahead = self._ahead, None
            return handed
        self.version += 1
        try:
            return self._push(runner)
        except RuntimeError:
            if self._pool.alive:
                self.version -= 1
                raise
        return self.revive(runner)

    def revive(self, runner: Runner, trained: bool = False) -> Handed:
        """Begin another pool with the trainer's present weights; the bytes handed over. The trainer is not at work.

        `trained`: the weights are newer than those of the lost pool, and count as the next version. Before the first
        hand-over there is no trainer to ask, and the pool has the weights that it began with.

        Raises:
            WorkerDied: pool after pool has died.
            NoPlace: the cluster has no room for another one; see `in_place_of`.
        """
        ahead = trained and self._engine is not None
        if ahead and self._ahead is None:
            self.version += 1
        version = self.version if self._engine is None else self.version - 1
        lost = self._pool.why
        while True:
            self._deaths += 1
            if self._deaths > RESTARTS:
                raise WorkerDied(f"Ray's samplers died {self._deaths} times in a row: see their messages above")
            self._pool.close()
            try:
                self._pool = in_place_of(lost, lambda: self._open(version))
                if self._engine is None:
                    return Handed(0)
                handed = self._push(runner)
            except RuntimeError as error:  # also where it dies before it has begun
                if self._pool.alive:
                    raise
                lost = self._pool.why or error
                continue
            if ahead:
                self._ahead = handed
            return handed

    def _push(self, runner: Runner) -> Handed:
        assert self._engine is not None
        told(Order(True, self.version))
        # The native engine runs the module that is trained: its names are the module's. vLLM reads a checkpoint's.
        live = self._config.cluster.rollout.engine == "native"
        return hand_over(self._engine, self._pool, self.version, runner, live=live)

    def _open(self, version: int) -> Workers:
        return open_pool(self._config, sampling_handlers, (self._config, self._tasks, self._model, version))


@dataclass(frozen=True)
class RaySession(Session):
    """A session whose episodes are played by Ray's samplers; what breaks with one of them is played again."""

    sampler: RaySamplers  # type: ignore[assignment]  # it answers with episodes, where an engine does with tokens

    def sync(self, engine: TrainEngine) -> Handed:
        """See `RaySamplers.take`."""
        handed = self.sampler.take(engine, self.runner)
        self.proof.owed = True
        told(Order(False, self.sampler.version, handed))
        return handed

    def asked(self, make: Callable[[], Coroutine[Any, Any, T]], trained: bool = False) -> T:
        """Return what the coroutine answers; made anew after each death. `trained`: see `RaySamplers.revive`."""
        while True:
            try:
                found = self.runner.run(make())
                break
            except WorkerDied:
                self.proof.owed |= self.sampler.revive(self.runner, trained).nbytes > 0
        told(Order(False, self.sampler.version))
        return found

    def probed(self, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> list[dict[str, Any]]:
        """Return what each of Ray's samplers answers to probes."""
        return self.asked(lambda: self.sampler.probed(prompts, media))

    async def playing(
        self, rows: Sequence[TaskRow], places: Sequence[int], sampling: Sampling, size: int
    ) -> list[list[Episode]]:
        """Return a group of `size` episodes of each row, under the numbers of `places`."""
        async with self.live.step(len(rows) * size):
            self.live.count(begun=len(rows) * size)
            return await self.sampler.played(rows, places, sampling, size, lambda count: self.live.count(ended=count))


def _paths() -> str:
    """Return where this process imports from: whole, as Bazel and virtual environments say it in ways of their own."""
    return os.pathsep.join(path for path in sys.path if path)


@contextmanager
def paths_of_children() -> Iterator[None]:
    """Let processes that are started inside, Ray's daemons among them, import from where this one does."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = _paths()
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
