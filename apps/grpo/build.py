"""What a run is made of: the engine that trains, what samples, the session between the two, and the schedule."""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.plan.buffers import kept_apart
from apps.common.run.interrupts import Runner
from apps.common.run.ranks import rank_and_world
from apps.common.run.reporter import Reporter
from apps.grpo.config import GrpoConfig
from apps.grpo.sampling.native import engine_config, native_engine
from apps.grpo.sampling.ray import RaySamplers, RaySession
from apps.grpo.sampling.ray_follower import FollowingSession, RayElsewhere
from apps.grpo.sampling.session import Session, chat_of
from apps.grpo.sampling.vllm import SamplerElsewhere, vllm_engine
from apps.grpo.schedules.async_follower import FollowingAsync
from apps.grpo.schedules.fully_async import FullyAsync
from apps.grpo.schedules.one_step_off import OneStepOff
from apps.grpo.schedules.sync import InTurn, Schedule
from apps.grpo.tasks.prompt_tasks import Conversation, Tasks
from apps.grpo.warm_start import warm_model, warm_start
from engines import TrainEngine, build_engine
from rollout import RolloutEngine

Demonstrations = Callable[[GrpoConfig, int], list[Conversation]]
Sampler = RolloutEngine | RaySamplers | SamplerElsewhere


def samples_elsewhere(config: GrpoConfig) -> bool:
    """Return whether the run starts processes that sample."""
    return config.cluster.schedule.mode == "fully_async" or config.cluster.rollout.ray_workers > 0


@dataclass(frozen=True)
class Start:
    """Where one rank's part of a run starts; its parts are made from this."""

    config: GrpoConfig
    tasks: Tasks
    tokenizer: PreTrainedTokenizerBase
    model: Path
    """The directory of the weights that the first step starts from."""
    run_dir: Path
    done: int
    """Steps done before."""
    checkpoint: Path | None
    """The weights after those."""
    given: RolloutEngine | None
    """What samples, where the caller of the run has it."""
    runner: Runner

    def warmed(self, demonstrations: Demonstrations | None) -> "Start":
        """Return from the warm start's model; it is made where it is not whole, unless there are steps after it."""
        if not self.config.warm_start.steps:
            return self
        folder = self.run_dir / "warm-start"
        warm = warm_model(folder)
        if warm is None and not self.done:
            if demonstrations is None:
                raise ValueError("a warm start needs demonstrations: hand them to train()")
            warm = warm_start(self.config, demonstrations, self.model, self.tokenizer, folder, self._looks)
        return replace(self, model=warm or self.model)

    def parts(self, stack: ExitStack) -> "Parts":
        """Return what trains and what samples, with the same weights; the stack closes what samples.

        A sampler takes its device before the engine does, but for one that computes with the engine's weights.
        """
        shared = self.given is None and kept_apart(self.config.engine, self.config.cluster) is None
        lender = self._engine() if shared else None
        sampler = self._sampler(stack, lender)
        session = None if sampler is None else self._session(sampler)
        engine = self._engine() if lender is None else lender
        if session is not None and (self.checkpoint is not None or self.given is not None):
            session.sync(engine)
        return Parts(self, engine, sampler, session)

    def _engine(self) -> TrainEngine:
        """Return what trains, at the checkpoint; beside it the frozen model that the run starts from, where the KL
        penalty needs one."""
        build = functools.partial(build_engine, engine_config(self.config, self.model))
        engine = build()
        if self.config.objective.kl_coef and not self.config.engine.lora.rank:
            engine.reference = build(trainable=False)
        if self.checkpoint is not None:
            engine.load(str(self.checkpoint))
        return engine

    def _sampler(self, stack: ExitStack, lender: TrainEngine | None) -> Sampler | None:
        """Return what this process samples with; None where the schedule starts a process that samples.

        `lender`: the engine whose weights it computes with.
        """
        config, layout = self.config, self.config.cluster.rollout
        version = max(0, self.done - 1)
        rank, world = rank_and_world()
        if config.cluster.schedule.mode == "fully_async":
            return None
        if layout.ray_workers and rank:
            return RayElsewhere(version)
        if layout.ray_workers:
            return stack.enter_context(RaySamplers(config, self.tasks, self.model, version))
        if self.given is not None:
            return self.given
        if layout.engine != "vllm":
            return native_engine(config, self.model, self.tokenizer, version, lender)
        if rank % layout.ranks_each(world):
            return SamplerElsewhere(version)
        sampler = stack.enter_context(vllm_engine(config, self.model, version))
        if layout.sleep:
            self.runner.run(sampler.sleep())  # before training takes the device
        return sampler

    def _session(self, sampler: Sampler) -> Session:
        chat = chat_of(self.config, self.tokenizer, self.model)
        if isinstance(sampler, RaySamplers):
            return RaySession(self.config, self.tasks, chat, sampler, self.runner)
        if isinstance(sampler, RayElsewhere):
            return FollowingSession(self.config, self.tasks, chat, sampler, self.runner)
        # SamplerElsewhere is asked nothing
        return Session(self.config, self.tasks, chat, sampler, self.runner)  # type: ignore[arg-type]

    def _looks(self, trained: TrainEngine) -> Session:
        """Return what a warm start looks at its progress with."""
        own = functools.partial(native_engine, self.config, self.model, self.tokenizer, 0, trained)
        return self._session(own() if self.given is None else self.given)


@dataclass(frozen=True)
class Parts:
    """What trains, and what samples beside it; without a sampler and a session where processes of the schedule do."""

    start: Start
    engine: TrainEngine
    sampler: Sampler | None
    session: Session | None

    def schedule(self, log: Reporter) -> Schedule:
        """Return who waits for whom, as the configuration says."""
        start = self.start
        config, tasks, run_dir, done = start.config, start.tasks, start.run_dir, start.done
        if self.session is None and rank_and_world()[0]:
            return FollowingAsync(config, tasks, self.engine, run_dir, done, start.runner)
        if self.session is None:
            return FullyAsync(config, tasks, self.engine, start.model, run_dir, done, start.runner, log.live)
        self.session.live.show = log.live
        kind = InTurn if config.cluster.schedule.mode == "sync" else OneStepOff
        return kind(config, self.session, self.engine, run_dir, done)
