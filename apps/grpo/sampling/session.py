"""What every rank of a GRPO run holds: the sampler, the chat format, the tasks; and how they are asked."""

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from apps.common.data.images import pictures_of
from apps.common.data.template_options import template_options
from apps.common.data.tokenizer import end_of_turn
from apps.common.run.interrupts import Runner
from apps.common.run.ranks import all_ranks, gather_lists, rank_and_world
from apps.grpo.config import GrpoConfig
from apps.grpo.reporting.episode_metrics import environment_metrics, episode_metrics
from apps.grpo.reporting.live import CountedEngine, CountedFactory, Live
from apps.grpo.schedules.transfer_result import Handed
from apps.grpo.tasks.environment_tasks import OwnTasks
from apps.grpo.tasks.prompt_tasks import Tasks
from apps.sft.reading.samples import stop_tokens_of
from chat_tools import detect_format
from engines import No, TrainEngine, WeightPiece, shared_weights
from engines.adapters.adapter_export import adapter_layout, adapter_pieces
from rollout import (
    Chat,
    Episode,
    NativeEngine,
    RolloutEngine,
    Sampling,
    SharingEngine,
    TaskRow,
    failures,
    run_group,
    share_weights,
)
from rollout.episodes.playing import together
from rollout.sync import Adapter, Manifest, buckets, transfer_weights
from rollout.sync.transfer import Receiver

T = TypeVar("T")
BUCKET_BYTES = 1 << 26  # of weights on their way to the sampler


@dataclass(frozen=True)
class Evaluation:
    """Answers to held-out tasks: an episode a row."""

    rows: Sequence[TaskRow]
    episodes: Sequence[Episode]
    environment_of: Callable[[str], str | None]

    @property
    def accuracy(self) -> float:
        """The mean reward of the episodes that were scored."""
        return fmean(episode.reward for episode in self.episodes if episode.score is not None)

    @property
    def metrics(self) -> dict[str, float]:
        """The accuracy, how long answers are and how many a limit cut off, and each environment's own mean reward."""
        found = episode_metrics(self.episodes)
        chosen = {"eval/accuracy": self.accuracy}
        chosen |= {f"eval/{name}": found[f"response/{name}"] for name in ("length", "truncated", "failed")}
        return chosen | environment_metrics(self.episodes, self.environment_of, "eval/reward/")


@dataclass
class Proof:
    """Whether samplers were handed weights that nothing has proven since (`apps.grpo.sampling.vllm.prove_weights`)."""

    owed: bool = False


@dataclass(frozen=True)
class Session:
    """One rank's part of the rollout side. The ranks share the prompts among them and exchange what was sampled."""

    config: GrpoConfig
    tasks: Tasks
    chat: Chat
    sampler: RolloutEngine
    runner: Runner
    live: Live = field(default_factory=Live)
    proof: Proof = field(default_factory=Proof)

    def sync(self, engine: TrainEngine) -> Handed:
        """Give the sampler the engine's present weights under the next version number.

        The samplers of all ranks take them, or none does. Nothing is handed over where they compute with the engine's
        own tensors.
        """
        if isinstance(self.sampler, SharingEngine):
            return share(engine, self.sampler, self.sampler.version + 1, self.runner)
        self.proof.owed = True
        # The app's own sampler runs the module that is trained; any other reads a checkpoint's names.
        live = isinstance(self.sampler, NativeEngine)
        return hand_over(engine, self.sampler, self.sampler.version + 1, self.runner, live=live)

    def sample(self, step: int) -> list[Episode]:
        """Return a group of answers to each of the step's prompts, on every rank, in order of the prompts."""
        rows = self.tasks.tasks(step, self.config.prompts)
        return self.gathered(self.asked(lambda: self.answers(rows)))

    def asked(self, make: Callable[[], Coroutine[Any, Any, T]], trained: bool = False) -> T:
        """Return what the coroutine answers that `make` begins.

        `trained`: the engine was trained since `sync`; a sampler that has to be replaced meanwhile has newer weights.
        """
        del trained  # the sampler of this process lives as long as it does
        return self.runner.run(make())

    async def answers(self, rows: Sequence[TaskRow]) -> list[Episode]:
        """Return this rank's part of a step: a group of answers to each of its prompts."""
        mine = self._mine(len(rows))
        groups = await self.playing([rows[i] for i in mine], mine, self.sampling, self.config.group_size)
        return [episode for group in groups for episode in group]

    def gathered(self, episodes: list[Episode]) -> list[Episode]:
        """Return the parts of all ranks together, in order of the prompts; every rank calls it."""
        return sorted(gather_lists(episodes), key=lambda episode: episode.group)

    def probed(
        self, prompts: Sequence[Sequence[int]], media: Sequence[Mapping[str, Any] | None]
    ) -> list[dict[str, Any]]:
        """Return what each sampler outside this process answers to probes (`apps.grpo.sampling.vllm.probe`); here there
        is none."""
        del prompts, media
        return []

    @property
    def sampling(self) -> Sampling:
        """How training's answers are sampled."""
        return replace(self.config.sampling, seed=self.config.seed)

    def evaluate(self, count: int | None = None) -> Evaluation:
        """Greedy answers to the held-out tasks, or to the first `count` of them, on every rank.

        Raises:
            ValueError: none of them could be scored.
        """
        rows = self.tasks.held_out()[:count]
        episodes = self.play(rows, greedy=True)
        if all(episode.score is None for episode in episodes):
            raise ValueError(f"none of {len(rows)} held-out prompts could be scored: {next(iter(failures(episodes)))}")
        return Evaluation(rows, episodes, self.environment_of)

    def play(self, rows: Sequence[TaskRow], greedy: bool) -> list[Episode]:
        """Return one episode a task, on every rank, in order of the tasks."""
        config = self.config
        sampling = likeliest(config) if greedy else self.sampling
        mine = self._mine(len(rows))
        groups = self.asked(lambda: self.playing([rows[i] for i in mine], mine, sampling, 1))
        return sorted(gather_lists([group[0] for group in groups]), key=lambda episode: episode.group)

    def accuracy(self, count: int | None = None) -> float:
        """Return mean reward of greedy answers to the held-out prompts, or to the first `count` of them; see
        `evaluate`."""
        return self.evaluate(count).accuracy

    def environment_of(self, task_id: str) -> str | None:
        """Return the environment that a task belongs to, where a run has several."""
        return environment_of(self.tasks, task_id)

    async def playing(
        self, rows: Sequence[TaskRow], places: Sequence[int], sampling: Sampling, size: int
    ) -> list[list[Episode]]:
        """Return a group of `size` episodes of each row, under the numbers of `places`."""
        limit = self.config.max_episode_seconds
        deadline = None if limit is None else time.monotonic() + limit
        async with self.live.step(len(rows) * size):
            engine: Any = CountedEngine(self.sampler, self.live)
            jobs = [
                run_group(
                    CountedFactory(self.tasks.environment(row), self.live),
                    engine,
                    self.chat,
                    sampling,
                    size=size,
                    row=row,
                    group=place,
                    max_turns=self.config.max_turns,
                    max_tokens=self.config.max_episode_tokens,
                    deadline=deadline,
                )
                for row, place in zip(rows, places, strict=True)
            ]
            return await together(jobs)

    def _mine(self, count: int) -> range:
        """Return of `count` tasks those that are asked by this rank: none where another has the sampler."""
        rank, world = rank_and_world()
        each = self.config.cluster.rollout.ranks_each(world)
        return range(rank // each, count, world // each) if rank % each == 0 else range(0)


def hand_over(
    engine: TrainEngine,
    sampler: Receiver,
    version: int,
    runner: Runner,
    *,
    live: bool,
    pause: Literal["finish", "abort"] | None = None,
) -> Handed:
    """Give a sampler the engine's present weights as number `version`. Every rank calls it.

    The samplers of all ranks take them, or none does. Of an engine with an adapter that alone: a sampler begins with
    the base. `live`: under the names of the module that is trained, in place of a checkpoint's. `pause`: how sampling
    is held meanwhile (`rollout.transfer_weights`).
    """
    size, device = 0, "cpu"
    layout = adapter_layout(engine, live)
    adapter = None if layout is None else Adapter(layout.rank, layout.scale, layout.layers)
    pieces = engine.export_weights(live=live) if adapter is None else adapter_pieces(engine, live)

    def counted() -> Iterator[WeightPiece]:
        nonlocal size, device
        for piece in pieces:
            device = str(piece.flat.device)
            size += piece.flat.numel() * piece.flat.element_size()
            yield piece

    stream = buckets(counted(), BUCKET_BYTES)
    manifest = Manifest(version, adapter=adapter)
    times = runner.run(transfer_weights([sampler], manifest, stream, pause=pause, agree=all_ranks))
    return Handed(size, times, "cpu" if getattr(sampler, "through_host", False) else device)


def share(engine: TrainEngine, sampler: SharingEngine, version: int, runner: Runner) -> Handed:
    """Let a sampler that computes with the engine's own tensors have them as number `version`; no byte is handed over.
    Every rank calls it, and their samplers all go on, or none does.

    Raises:
        RuntimeError: the engine lends them no longer (it was moved to the host).
        NonFiniteError: they are not finite; the sampler then answers nobody.
    """
    lent = shared_weights(engine)
    if isinstance(lent, No):
        raise RuntimeError(f"weights {version} can't be shared with the sampler any more: {lent.reason}")
    return Handed(0, runner.run(share_weights(sampler, version, lent, agree=all_ranks)))


def environment_of(tasks: Tasks, task_id: str) -> str | None:
    """Return the environment that a task belongs to, where a run has several."""
    several = isinstance(tasks, OwnTasks) and len(tasks.parts) > 1
    return task_id.partition("/")[0] if several else None


def likeliest(config: GrpoConfig) -> Sampling:
    """Return how an evaluation samples: the likeliest token, with the limits of the run."""
    asked = config.sampling
    return Sampling(greedy=True, max_new_tokens=asked.max_new_tokens, stop_token_ids=asked.stop_token_ids)


def chat_of(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase, model: Path | None = None) -> Chat:
    """Return the chat format of a run: the tokenizer's own template with the options of the configuration.

    `model`: the directory whose generation_config.json says at which tokens the model stops.
    """
    stops = None if model is None else stop_tokens_of(model, tokenizer)
    end = end_of_turn(tokenizer) if stops is None else None
    options = template_options(config.own.template_options)
    form = tool_format_of(config, tokenizer) or "qwen3_xml"  # some format, of calls that nobody makes (`check_prompts`)
    return Chat(tokenizer, end, form, stop_tokens=stops, pictures=pictures_of(config.engine, model), **options)


def tool_format_of(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return how the model writes tool calls: as the configuration says, or its chat template shows; None: neither
    does."""
    if config.own.tool_format is not None:
        return config.own.tool_format
    try:
        return detect_format(tokenizer)
    except ValueError:
        return None
