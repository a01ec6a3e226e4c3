"""Rollout side of one rank: its sampler, the chat format and the tasks, and how they make a step's episodes."""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal, TypeVar, cast, get_args

from rollout import Chat, Episode, NativeEngine, RolloutEngine, Sampling, SharingEngine, TaskRow, failures, run_group
from rollout.environments.processes.pool import EnvironmentProcesses
from rollout.episodes.runner import together
from rollout.episodes.summary import AnyEpisode
from schedules.protocols import NumericEngine, ProcessEngine, SamplerSource, Tasks, Trainer, environment_of
from schedules.reporting.episode_metrics import environment_metrics, episode_metrics
from schedules.reporting.live import CountedFactory, Live, MeteredEngine
from schedules.rows.shared import fetch_all, gather_episodes
from schedules.runtime.collectives import gather_lists, rank_and_world
from schedules.runtime.interrupts import Runner
from schedules.sampling.first_batch import FirstBatch
from schedules.sampling.remote_sampler import RemoteSampler
from schedules.sampling.settings import RolloutSettings
from schedules.weights.sampler_bound import SamplerBound, sampler_bound
from schedules.weights.transfer_result import TransferResult
from schedules.weights.weight_checks import Media, sample_checks
from schedules.weights.weight_sync import sync_shared_weights, sync_weights

T = TypeVar("T")
HeldOutMetric = Literal["accuracy", "score"]
"""What the mean reward of held-out responses is called: "accuracy" where a reward is 0 or 1, else "score"."""


@dataclass(frozen=True)
class Evaluation:
    """Responses to held-out tasks; an episode's `group` is its row."""

    rows: Sequence[TaskRow]
    episodes: Sequence[AnyEpisode]
    environment_of: Callable[[str], str | None]
    declared: HeldOutMetric | None = None
    """What the tasks call their mean reward; None: what these rewards look like."""

    @property
    def accuracy(self) -> float:
        """Mean reward of the episodes that were scored."""
        return fmean(episode.reward for episode in self.episodes if episode.score is not None)

    @property
    def metric(self) -> HeldOutMetric:
        """What the mean reward is called: as the tasks declare, else "accuracy" where every reward is 0 or 1."""
        binary = all(episode.reward in (0, 1) for episode in self.episodes if episode.score is not None)
        return self.declared or ("accuracy" if binary else "score")

    @property
    def metrics(self) -> dict[str, float]:
        """What `metrics_as` returns, under the name `metric`."""
        return self.metrics_as(self.metric)

    def metrics_as(self, metric: HeldOutMetric) -> dict[str, float]:
        """Return the mean reward under this name, how long responses are and how many a limit cut off, and each
        environment's mean reward."""
        of_episodes = episode_metrics(self.episodes)
        metrics = {f"eval/{metric}": self.accuracy}
        metrics |= {f"eval/{name}": of_episodes[f"response/{name}"] for name in ("length", "truncated", "failed")}
        return metrics | environment_metrics(self.episodes, self.environment_of, "eval/reward/")


def evaluation_of(tasks: Tasks, episodes: Sequence[AnyEpisode], rows: Sequence[TaskRow]) -> Evaluation:
    """Return the evaluation that these episodes of held-out rows make.

    Raises:
        ValueError: there are none, none of them could be scored, or the tasks declare no known metric.
    """
    if not rows:
        raise ValueError(f"{type(tasks).__name__}.held_out() gives no task: an evaluation needs at least one")
    if all(episode.score is None for episode in episodes):
        raise ValueError(f"none of {len(rows)} held-out prompts could be scored: {next(iter(failures(episodes)))}")
    return Evaluation(rows, episodes, lambda task_id: environment_of(tasks, task_id), declared_metric(tasks))


def declared_metric(tasks: object) -> HeldOutMetric | None:
    """Return what tasks declare that their mean reward is called, by `held_out_metric`; None where they do not.

    Raises:
        ValueError: it is neither "accuracy" nor "score".
    """
    declared = getattr(tasks, "held_out_metric", None)
    if declared is not None and declared not in get_args(HeldOutMetric):
        raise ValueError(f'held_out_metric must be "accuracy" or "score", got {declared!r}')
    return cast(HeldOutMetric | None, declared)


def bound_of(engine: RolloutEngine, settings: RolloutSettings, source: SamplerSource | None) -> SamplerBound:
    """Return the bound of a sampler's log-probs; one that nobody tells the dtype of may compute in bfloat16."""
    told = getattr(engine, "dtype", "bfloat16") if source is None else source.dtype(engine)
    numerics = engine.numerics if isinstance(engine, NumericEngine) else {}
    dtype = str(told).removeprefix("torch.")
    return sampler_bound(dtype, settings.trainer_dtype, numerics, settings.allow_untested)


@dataclass
class PendingCheck:
    """Whether samplers got weights that no weight check has looked at since."""

    pending: bool = False


@dataclass(frozen=True)
class RolloutSession:
    """One rank's part of the rollout side. The ranks share the prompts among them and exchange what was sampled.

    `source`: what made the sampler; None where the caller brought it.
    """

    settings: RolloutSettings
    tasks: Tasks
    chat: Chat
    sampler: RolloutEngine
    runner: Runner
    source: SamplerSource | None = None
    live: Live = field(default_factory=Live)
    check: PendingCheck = field(default_factory=PendingCheck)
    first: FirstBatch = field(default_factory=FirstBatch)
    processes: EnvironmentProcesses = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        processes = EnvironmentProcesses(
            settings.environment_processes,
            settings.stall_seconds,
            settings.environment_memory_gib,
            settings.environment_servers,
        )
        object.__setattr__(self, "processes", processes)

    def sync(self, trainer: Trainer) -> TransferResult:
        """Give the sampler the trainer's present weights under the next version number.

        The samplers of all ranks take them, or none does. Nothing is copied where they compute with the trainer's own
        tensors.
        """
        version = self.sampler.version + 1
        if isinstance(self.sampler, SharingEngine):
            return sync_shared_weights(trainer, self.sampler, version, self.runner)
        self.check.pending = True
        return sync_weights(trainer, self.sampler, version, self.runner, module_names=self.module_names)

    @property
    def module_names(self) -> bool:
        """Whether the sampler takes weights under the names of the trained module."""
        return isinstance(self.sampler, NativeEngine) if self.source is None else self.source.module_names

    def sample(self, step: int) -> list[AnyEpisode]:
        """Return a group of episodes for each of the step's prompts, in order of the prompts; see `gather`."""
        return self.play_groups(self.tasks.tasks(step, self.settings.prompts_per_step))

    def play_groups(self, rows: Sequence[TaskRow]) -> list[AnyEpisode]:
        """Return a group of episodes for each of these prompts, on every rank, in their order."""
        return self.gather(self.run(lambda: self.rollout_local(rows)))

    def run(self, make: Callable[[], Coroutine[Any, Any, T]], trained: bool = False) -> T:
        """Return what the coroutine returns that `make` begins.

        `trained`: the trainer was trained since `sync`; a sampler that has to be replaced meanwhile has newer weights.
        """
        del trained  # the sampler of this process lives as long as it does
        return self.runner.run(make())

    async def rollout_local(self, rows: Sequence[TaskRow]) -> list[Episode]:
        """Return this rank's part of a step: a group of episodes for each of its prompts."""
        mine = self._mine(len(rows))
        settings = self.settings
        groups = await self.rollout_groups([rows[i] for i in mine], mine, settings.sampling, settings.group_size)
        return [episode for group in groups for episode in group]

    def gather(self, episodes: Sequence[Episode]) -> list[AnyEpisode]:
        """Return the parts of all ranks together, in order of the prompts; every rank calls it. See
        `gather_episodes`."""
        return sorted(gather_episodes(episodes), key=lambda episode: episode.group)

    def sample_checks(self, prompts: Sequence[Sequence[int]], media: Sequence[Media]) -> list[dict[str, Any]]:
        """Return what each sampler outside this process says of its weights (`sample_checks`); of one inside nothing:
        it needs no check."""
        engine = self.sampler
        if self.source is None or not isinstance(engine, ProcessEngine):
            return []
        bound = bound_of(engine, self.settings, self.source)
        return [self.runner.run(sample_checks(engine, self.chat, self.settings.sampling, bound, prompts, media))]

    def bounds(self) -> list[SamplerBound]:
        """Return the bound of each sampler of every rank; collective."""
        return gather_lists(self.own_bounds(), (SamplerBound,))

    def own_bounds(self) -> list[SamplerBound]:
        """Return the bounds of the samplers that this rank has; none where another has them."""
        if isinstance(self.sampler, RemoteSampler):
            return []
        return [bound_of(self.sampler, self.settings, self.source)]

    def evaluate(self, count: int | None = None) -> Evaluation:
        """Return responses to the held-out tasks, or to the first `count` of them, on every rank, numbered by task;
        to each as many as the settings say.

        Raises:
            ValueError: none of them could be scored.
        """
        rows = self.tasks.held_out()[:count]
        settings = self.settings
        return evaluation_of(self.tasks, self._play(rows, settings.evaluation, settings.num_generations_eval), rows)

    def play(self, rows: Sequence[TaskRow], greedy: bool) -> list[Episode]:
        """Return one episode a task, on every rank, in order of the tasks."""
        return fetch_all(self._play(rows, self.settings.greedy if greedy else self.settings.sampling, 1))

    def _play(self, rows: Sequence[TaskRow], sampling: Sampling, size: int) -> list[AnyEpisode]:
        mine = self._mine(len(rows))
        groups = self.run(lambda: self.rollout_groups([rows[i] for i in mine], mine, sampling, size))
        return self.gather([episode for group in groups for episode in group])

    def accuracy(self, count: int | None = None) -> float:
        """Return the mean reward of responses to the held-out prompts, or to the first `count` of them."""
        return self.evaluate(count).accuracy

    def environment_of(self, task_id: str) -> str | None:
        """Return the environment that a task belongs to, where a run has several."""
        return environment_of(self.tasks, task_id)

    async def rollout_groups(
        self, rows: Sequence[TaskRow], places: Sequence[int], sampling: Sampling, size: int
    ) -> list[list[Episode]]:
        """Return a group of `size` episodes of each row, under the numbers of `places`."""
        limit = self.settings.max_episode_seconds
        deadline = None if limit is None else time.monotonic() + limit
        async with self.live.step(len(rows) * size):
            engine: Any = MeteredEngine(self.sampler, self.live)
            jobs = [
                run_group(
                    CountedFactory(self.processes.wrap(self.tasks.environment(row)), self.live),
                    engine,
                    self.chat,
                    sampling,
                    size=size,
                    row=row,
                    group=place,
                    max_turns=self.settings.max_turns,
                    max_tokens=self.settings.max_episode_tokens,
                    deadline=deadline,
                )
                for row, place in zip(rows, places, strict=True)
            ]
            return await together(jobs)

    def _mine(self, count: int) -> range:
        """Return the numbers of the tasks, of `count`, that this rank samples: none where another has the sampler."""
        rank, world = rank_and_world()
        each = self.settings.ranks_per_sampler
        return range(rank // each, count, world // each) if rank % each == 0 else range(0)
