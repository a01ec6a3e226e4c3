"""Sampling from outside the run's own process: an engine, the tasks and their environments.

The sampling process of a fully asynchronous run, or an actor of a Ray cluster in any schedule. An engine that has a
process of its own ends together with this one, and the run starts others.
"""

import asyncio
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from rollout import RolloutEngine, Sampling, StructuredOutputs
from rollout.episodes.codec import encode_episodes
from rollout.partial_rollout import ResumableEngine
from rollout.workers.process import WorkerProcess
from rollout.workers.protocol import Workers
from rollout.workers.serve import Handler, serve, weight_handlers
from schedules.protocols import ProcessEngine, SamplerSource, Tasks
from schedules.runtime.interrupts import Runner
from schedules.sampling.numbered_tasks import NumberedRows
from schedules.sampling.session import RolloutSession, bound_of
from schedules.sampling.settings import RolloutSettings
from schedules.weights.weight_checks import decode_media, sample_checks
from seqpack.memory import ledger

Wait = Callable[["Sequence[Future[Any]]"], object]
"""Returns once all futures have ended."""


class StartSampling(Protocol):
    """Starter of what samples for a fully asynchronous run."""

    @property
    def settings(self) -> RolloutSettings:
        """Prompts of a step and limits of their episodes."""
        ...

    @property
    def module_names(self) -> bool:
        """Whether it takes weights under the names of the trained module, not of its checkpoint."""
        ...

    def __call__(self, version: int, place: Mapping[str, Any] | None, wait: Wait) -> Workers:
        """Return samplers with the run's first weights, which count as number `version`, once they have begun.

        `place`: of `NumberedRows`. `wait` waits for the beginning. WorkerDied: one ended before it had begun.
        """
        ...


@dataclass(frozen=True)
class StartProcess:
    """Starter of one process beside the trainer."""

    source: SamplerSource
    tasks: Tasks
    settings: RolloutSettings

    @property
    def module_names(self) -> bool:
        """Whether it takes weights under the names of the trained module."""
        return self.source.module_names

    def begin(self, version: int, place: Mapping[str, Any] | None) -> Workers:
        """Begin to start the process, and return it; see `BeginSampling`."""
        limit = self.settings.stall_seconds
        return WorkerProcess(generate, (self.source, self.tasks, self.settings, version, place), limit)

    def __call__(self, version: int, place: Mapping[str, Any] | None, wait: Wait = wait) -> Workers:
        """Return the process; see `StartSampling`."""
        return wait_until_ready(self.begin(version, place), wait)


def wait_until_ready(workers: Workers, wait: Wait) -> Workers:
    """Return the workers once they are ready; those that could not begin are closed. WorkerDied: one of them ended."""
    ready = False
    try:
        wait([workers.ready])
        workers.ready.result()
        ready = True
    finally:
        if not ready:
            workers.close()
    return workers


def generate(
    connection: "Connection[Any, Any]",
    source: SamplerSource,
    tasks: Tasks,
    settings: RolloutSettings,
    version: int,
    place: Mapping[str, Any] | None,
) -> None:
    """Serve `generating_handlers` until the run is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's: it ends this process
    serve(connection, generating_handlers(source, tasks, settings, version, place))


def generating_handlers(
    source: SamplerSource, tasks: Tasks, settings: RolloutSettings, version: int, place: Mapping[str, Any] | None
) -> dict[str, Handler]:
    """Return the calls of a fully asynchronous run: "play" (a group by its number), "evaluate", "load" (what is in
    flight), those of weight sync, "probe" (responses that check them), and "bound" (`SamplerBound`).

    `version`: the number of the first weights. `place`: of `NumberedRows`.
    """
    source.prepare_process()
    sampler = source.engine(version)
    engine = ResumableEngine(sampler)
    session = RolloutSession(settings, tasks, source.chat(), engine, Runner())
    players = _players(session, NumberedRows(tasks, settings.prompts_per_step, place))
    return _ending_with(sampler, weight_handlers(engine) | players | _checker(session, sampler, source))


def read_sampling(fields: Mapping[str, Any]) -> Sampling:
    """Return the settings whose fields came as JSON."""
    wanted = dict(fields["structured_outputs"])
    wanted["choice"] = tuple(wanted["choice"])
    return Sampling(**{**fields, "structured_outputs": StructuredOutputs(**wanted)})


def sampling_handlers(
    source: SamplerSource, tasks: Tasks, settings: RolloutSettings, version: int
) -> dict[str, Handler]:
    """Return the calls of a sampler that is told which tasks to play: "sample", "probe" and "bound" (see
    `generating_handlers`), and those of weight sync."""
    source.prepare_process()
    engine = source.engine(version)
    session = RolloutSession(settings, tasks, source.chat(), engine, Runner())

    async def sample(call: dict[str, Any]) -> bytes:
        sampling = read_sampling(call["sampling"])
        groups = await session.rollout_groups(call["rows"], call["places"], sampling, call["size"])
        return encode_episodes([episode for group in groups for episode in group])

    return _ending_with(engine, weight_handlers(engine) | {"sample": sample} | _checker(session, engine, source))


def _players(session: RolloutSession, rows: NumberedRows) -> dict[str, Handler]:
    settings = session.settings

    async def play(call: dict[str, Any]) -> bytes:
        rows.forget(int(call["oldest"]))
        group = int(call["group"])
        groups = await session.rollout_groups([rows[group]], [group], settings.sampling, settings.group_size)
        return encode_episodes(groups[0])

    async def evaluate(call: dict[str, Any]) -> bytes:
        del call
        held_out = session.tasks.held_out()
        places, size = range(len(held_out)), settings.num_generations_eval
        groups = await session.rollout_groups(held_out, places, settings.evaluation, size)
        return encode_episodes([episode for group in groups for episode in group])

    async def load(call: dict[str, Any]) -> dict[str, int]:
        del call
        live, requests = session.live, session.sampler.load()
        return {"episodes": live.started - live.ended, "running": requests.running, "waiting": requests.waiting}

    return {"play": play, "evaluate": evaluate, "load": load}


def _checker(session: RolloutSession, sampler: RolloutEngine, source: SamplerSource) -> dict[str, Handler]:
    limit = bound_of(sampler, session.settings, source)

    async def probe(call: dict[str, Any]) -> dict[str, Any]:
        media = decode_media(call["media"])
        how = session.settings.sampling
        said = await sample_checks(sampler, session.chat, how, limit, call["prompts"], media)
        return {**said, "metrics": said["metrics"] | ledger.metrics()}

    async def bound(call: dict[str, Any]) -> dict[str, Any]:
        del call
        return asdict(limit)

    return {"probe": probe, "bound": bound}


def _ending_with(sampler: RolloutEngine, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return the handlers; where one fails because the engine's own process is gone, this one ends too."""
    if not isinstance(sampler, ProcessEngine):
        return dict(handlers)

    async def stay(call: dict[str, Any]) -> None:
        """Answer by the end of this process, which ends with the engine's."""
        del call
        while sampler.alive:
            await asyncio.sleep(1)
        raise RuntimeError("the engine's process is gone")

    return {name: _ending(sampler, handler) for name, handler in (*handlers.items(), ("stay", stay))}


def _ending(sampler: ProcessEngine, handler: Handler) -> Handler:
    async def handle(call: dict[str, Any]) -> bytes | dict[str, Any] | None:
        try:
            return await handler(call)
        except RuntimeError:
            if not sampler.alive:
                traceback.print_exc()
                os._exit(1)
            raise

    return handle
