"""Building of a run: the trainer, what samples, the session between the two, and the schedule."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from apps.common.ray_devices import ray_settings
from apps.common.run.reporter import Reporter
from apps.common.samplers import sampler_backend
from apps.common.tasks import Tasks
from apps.grpo.config import GrpoConfig, TeacherWarmStart, WarmStart
from apps.grpo.sampling.native import engine_config
from apps.grpo.sampling.source import RunSampler, rollout_settings
from apps.grpo.step import GrpoTrainer
from apps.grpo.tasks.prompt_tasks import Conversation
from apps.grpo.teachers import Teachers
from apps.grpo.warm_start import warm_model, warm_start
from engines import TrainEngine, build_engine, build_reference
from engines.loading import LoadedModel, open_model
from rollout import RolloutEngine
from schedules.protocols import SleepingEngine
from schedules.ray.cluster import start_sampling
from schedules.ray.follower import RayFollower, RayFollowerSession
from schedules.ray.samplers import RaySamplers, RaySession
from schedules.registry import ScheduleParts, build_schedule
from schedules.runtime.collectives import rank_and_world
from schedules.runtime.interrupts import Runner
from schedules.sampling.early_start import begin_early, build_beside
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.sampling.sampler_process import StartSampling
from schedules.sampling.session import RolloutSession
from schedules.sampling.settings import RunState
from schedules.schedule import Schedule

Demonstrations = Callable[[GrpoConfig, int], list[Conversation]]
Sampler = RolloutEngine | RaySamplers | RemoteSampler


def samples_remotely(config: GrpoConfig) -> bool:
    """Return whether the run starts processes that sample."""
    return config.cluster.schedule.mode == "fully_async" or config.cluster.rollout.ray_workers > 0


@dataclass(frozen=True)
class RunBuilder:
    """Start of one rank's part of a run; its components are made from this."""

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
    opened: LoadedModel | None = None
    """The model, where this process has opened its directory already."""

    def warmed(self, demonstrations: Demonstrations | None) -> "RunBuilder":
        """Return a start from the warm start's model, unless there are steps after one that is not whole; with the
        teacher that is made like it. Both are made where they are not there."""
        start, teachers, done = self, self.config.teachers, self.done
        if teachers.teacher_warm_start.steps:
            made = replace(self, opened=None)._made(teachers.teacher_warm_start, "teacher", demonstrations)
            teachers = replace(teachers, teacher=(str(made),), teacher_warm_start=TeacherWarmStart())
            start = replace(start, config=replace(self.config, teachers=teachers))
        folder = "warm-start"
        if not self.config.warm_start.steps or (done and warm_model(self.run_dir / folder) is None):
            return start
        return replace(start, model=start._made(self.config.warm_start, folder, demonstrations), opened=None)

    def _made(self, settings: WarmStart, name: str, demonstrations: Demonstrations | None) -> Path:
        """Return the model that a warm start makes in a folder of the run; it is made where it is not whole."""
        folder = self.run_dir.absolute() / name  # Ray's actors have another working directory
        if (model := warm_model(folder)) is not None:
            return model
        if demonstrations is None:
            raise ValueError("a warm start needs demonstrations: hand them to train()")
        config = replace(self.config, warm_start=settings)
        return warm_start(config, demonstrations, self.model, self.tokenizer, folder, self._warm_session, self.opened)

    @property
    def source(self) -> RunSampler:
        """Maker of the run's samplers."""
        return RunSampler(self.config, self.model)

    def components(self, stack: ExitStack) -> "RunComponents":
        """Return what trains and what samples, with the same weights; the stack closes what samples.

        A sampler that computes with the engine's weights comes after it. Any other begins before it, and one in a
        process of its own starts while the engine is built (`build_beside`).
        """
        shared = self.given is None and self.source.backend.weights_apart(self.config) is None
        trained = self._engine() if shared else None
        begin = self._start_sampling(stack)
        sampler = None if begin is not None else self._sampler(stack, trained)

        def build(opened: LoadedModel | None) -> GrpoTrainer:
            teachers = Teachers.of(self.config, self.tasks, self.source.chat, stack)
            return GrpoTrainer(self.config, self._engine(opened) if trained is None else trained, teachers)

        def ready() -> None:
            if self.config.cluster.rollout.sleep and sampler is not self.given and isinstance(sampler, SleepingEngine):
                self.runner.run(sampler.sleep())  # before training takes the device

        trainer = build_beside(sampler, self._opened, build, ready, self._shares_device)
        session = None if sampler is None else self._session(sampler)
        if session is not None and (self.checkpoint is not None or self.given is not None):
            session.sync(trainer)
        return RunComponents(self, trainer, sampler, session, begin)

    @property
    def _shares_device(self) -> bool:
        """Whether the sampler takes memory of a device that training has: Ray's have devices of their own."""
        layout = self.config.cluster.rollout
        return not layout.ray_workers and layout.backend.shares_device(self.config)

    def _opened(self) -> LoadedModel:
        """Return the model, without memory for its values."""
        return self.opened or open_model(engine_config(self.config, self.model))

    def _start_sampling(self, stack: ExitStack) -> StartSampling | None:
        """Return what starts processes that sample, where the schedule does; those of a new run begin now."""
        config, world = self.config, rank_and_world()[1]
        if config.cluster.schedule.mode != "fully_async":
            return None
        settings = rollout_settings(config, world)
        begin = start_sampling(ray_settings(config, world), self.source, self.tasks, settings)
        return begin_early(begin, self.tasks, stack, not self.done and not self._shares_device)

    def _engine(self, opened: LoadedModel | None = None) -> TrainEngine:
        """Return what trains, at the checkpoint; beside it the reference model, where the KL penalty needs one."""
        settings = engine_config(self.config, self.model)
        engine = build_engine(settings, opened or self.opened)
        if self.config.needs_reference and not self.config.engine.lora.rank:
            engine.reference = build_reference(settings)
        if self.checkpoint is not None:
            engine.load(str(self.checkpoint))
        return engine

    def _sampler(self, stack: ExitStack, trained: TrainEngine | None) -> Sampler:
        """Return what this process samples with, which may be starting still.

        `trained`: the engine whose weights it computes with.
        """
        config, layout = self.config, self.config.cluster.rollout
        version = max(0, self.done - 1)
        rank, world = rank_and_world()
        if layout.ray_workers and rank:
            return RayFollower(version)
        if (ray := ray_settings(config, world)) is not None:
            settings = rollout_settings(config, world)
            return stack.enter_context(RaySamplers(ray, self.source, self.tasks, settings, version))
        if self.given is not None:
            return self.given
        if rank % layout.ranks_each(world):
            return RemoteSampler(version)
        backend = layout.backend
        engine: RolloutEngine | None = backend.begin(config, self.model, version)
        if engine is None:
            engine = backend.build_sharing(config, self.model, version, trained)
        if isinstance(engine, AbstractContextManager):
            stack.enter_context(engine)
        return engine

    def _session(self, sampler: Sampler) -> RolloutSession:
        settings = rollout_settings(self.config, rank_and_world()[1])
        kind: type[RolloutSession] = RolloutSession
        if isinstance(sampler, RaySamplers):
            kind = RaySession
        elif isinstance(sampler, RayFollower):
            kind = RayFollowerSession
        source = None if sampler is self.given else self.source
        # a RemoteSampler is asked nothing
        return kind(settings, self.tasks, self.source.chat(), sampler, self.runner, source)  # type: ignore[arg-type]

    def _warm_session(self, trained: TrainEngine) -> tuple[RolloutSession, GrpoTrainer]:
        """Return the session that evaluates a warm start's progress, and its trainer."""
        if self.given is not None:
            engine: RolloutEngine = self.given
        else:
            engine = sampler_backend("native").build_sharing(self.config, self.model, 0, trained)
        settings = rollout_settings(self.config, rank_and_world()[1])
        session = RolloutSession(settings, self.tasks, self.source.chat(), engine, self.runner)
        return session, GrpoTrainer(self.config, trained)


@dataclass(frozen=True)
class RunComponents:
    """The trainer, and what samples beside it; without a sampler and a session where processes of the schedule do."""

    start: RunBuilder
    trainer: GrpoTrainer
    sampler: Sampler | None
    session: RolloutSession | None
    begin: StartSampling | None = None
    """What starts processes that sample, where the schedule does."""

    def schedule(self, log: Reporter) -> Schedule:
        """Return who waits for whom, as the configuration says."""
        start, config = self.start, self.start.config
        if self.session is not None:
            self.session.live.show = log.live
        run = RunState(start.run_dir, config.steps, start.done, config.keep_checkpoints)
        parts = ScheduleParts(
            config.cluster.schedule, start.tasks, self.trainer, run, start.runner, self.session, self.begin, log.live
        )
        return build_schedule(parts)
