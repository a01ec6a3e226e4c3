"""Who samples for a run from outside its own process: an engine, the tasks and their environments.

The sampling process of a fully asynchronous run, or an actor of a Ray cluster in any schedule. The engine is the native
one, or vLLM in a process of its own; the two end together, and the run starts others.
"""

import os
import signal
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from apps.common.data.tokenizer import load_tokenizer, quiet_libraries
from apps.common.run.interrupts import Runner
from apps.common.run.ranks import init_rank
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import native_dtype, native_engine
from apps.grpo.sampling.session import Session, chat_of, likeliest
from apps.grpo.sampling.vllm import probe, read_shown, vllm_engine
from apps.grpo.schedules.numbered_tasks import NumberedRows
from apps.grpo.tasks.prompt_tasks import Tasks
from rollout import NativeEngine, Sampling, VllmEngine
from rollout.partial_rollout import ContinuedEngine
from rollout.episodes.codec import encode_episodes
from rollout.workers.serve import Handler, serve, weight_handlers


def generate(
    connection: "Connection[Any, Any]",
    config: GrpoConfig,
    tasks: Tasks,
    model: Path,
    version: int,
    place: Mapping[str, Any] | None,
) -> None:
    """Answer what `generating_handlers` does until the run is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's: it ends this process
    serve(connection, generating_handlers(config, tasks, model, version, place))


def generating_handlers(
    config: GrpoConfig, tasks: Tasks, model: Path, version: int, place: Mapping[str, Any] | None
) -> dict[str, Handler]:
    """Return of a fully asynchronous run: "play" (a group by its number), "evaluate", "load" (what is in flight), what
    hands over weights, and "probe" (answers that prove them).

    `version`: the number that the weights of `model` count as. `place`: of `NumberedRows`.
    """
    init_rank(config.threads, config.seed)
    quiet_libraries()
    tokenizer = load_tokenizer(model)
    sampler = _engine(config, model, tokenizer, version)
    engine = ContinuedEngine(sampler)
    session = Session(config, tasks, chat_of(config, tokenizer, model), engine, Runner())
    players = _players(config, session, NumberedRows(tasks, config.prompts, place))
    return _ending_with(sampler, weight_handlers(engine) | players | _prober(session, sampler, model))


def sampling_handlers(config: GrpoConfig, tasks: Tasks, model: Path, version: int) -> dict[str, Handler]:
    """Return of a sampler that is told which tasks to play: "sample", "probe", and what hands over weights."""
    init_rank(config.threads, config.seed)
    quiet_libraries()
    tokenizer = load_tokenizer(model)
    engine = _engine(config, model, tokenizer, version)
    session = Session(config, tasks, chat_of(config, tokenizer, model), engine, Runner())

    async def sample(call: dict[str, Any]) -> bytes:
        groups = await session.playing(call["rows"], call["places"], Sampling(**call["sampling"]), call["size"])
        return encode_episodes([episode for group in groups for episode in group])

    return _ending_with(engine, weight_handlers(engine) | {"sample": sample} | _prober(session, engine, model))


def _engine(
    config: GrpoConfig, model: Path, tokenizer: PreTrainedTokenizerBase, version: int
) -> NativeEngine | VllmEngine:
    if config.cluster.rollout.engine == "vllm":
        return vllm_engine(config, model, version)
    return native_engine(config, model, tokenizer, version)


def _players(config: GrpoConfig, session: Session, rows: NumberedRows) -> dict[str, Handler]:
    async def play(call: dict[str, Any]) -> bytes:
        rows.forget(int(call["oldest"]))
        group = int(call["group"])
        groups = await session.playing([rows[group]], [group], session.sampling, config.group_size)
        return encode_episodes(groups[0])

    async def evaluate(call: dict[str, Any]) -> bytes:
        del call
        held_out = session.tasks.held_out()
        groups = await session.playing(held_out, range(len(held_out)), likeliest(config), 1)
        return encode_episodes([group[0] for group in groups])

    async def load(call: dict[str, Any]) -> dict[str, int]:
        del call
        live, requests = session.live, session.sampler.load()
        return {"episodes": live.begun - live.ended, "running": requests.running, "waiting": requests.waiting}

    return {"play": play, "evaluate": evaluate, "load": load}


def _prober(session: Session, sampler: NativeEngine | VllmEngine, model: Path) -> dict[str, Handler]:
    vllm = sampler if isinstance(sampler, VllmEngine) else None
    dtype = native_dtype(session.config, model) if vllm is None else vllm.facts["dtype"]
    return {"probe": lambda call: probe(session, call["prompts"], dtype, vllm, read_shown(call["media"]))}


def _ending_with(sampler: NativeEngine | VllmEngine, handlers: Mapping[str, Handler]) -> dict[str, Handler]:
    """Return the handlers; where one fails because vLLM's process is gone, this one ends too."""
    if not isinstance(sampler, VllmEngine):
        return dict(handlers)
    return {name: _ending(sampler, handler) for name, handler in handlers.items()}


def _ending(sampler: VllmEngine, handler: Handler) -> Handler:
    async def handle(call: dict[str, Any]) -> bytes | dict[str, Any] | None:
        try:
            return await handler(call)
        except RuntimeError:
            if not sampler.alive:
                traceback.print_exc()
                os._exit(1)
            raise

    return handle
