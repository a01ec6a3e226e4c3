"""Protocols that a schedule knows a trainer, a sampler and tasks by."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDict
from torch import Tensor

from rollout import Chat, Completion, EnvironmentFactory, Episode, RolloutEngine, Sampling, TaskRow, TaskSource
from rollout.episodes.summary import AnyEpisode
from rollout.sync import Adapter
from rollout.sync.pieces import BucketPiece
from rollout.workers.shard_exchange import HeldShard


@dataclass(frozen=True)
class TrainResult:
    """Metrics of the training on one step's episodes, and the advantage of each episode (0 where it failed)."""

    metrics: dict[str, float]
    advantages: list[float]
    sampler_difference: float | None = None
    """Mean |difference| between the sampler's log-probs of the sampled tokens and the trainer's as the step began; None
    where no token was computed, or the trainer measures none (see `ScoringTrainer`)."""


@dataclass(frozen=True)
class WeightExport:
    """Pieces of a trainer's weights (`rollout.sync.pieces.Piece`), or of its adapter alone.

    `shards`: what this rank holds of the same tensors (`rollout.workers.shard_exchange.HeldShard`), where the ranks are
    to send those; the pieces are then not read. On all ranks or on none.
    """

    pieces: Iterable[Any]
    adapter: Adapter | None = None
    shards: Iterable[HeldShard] | None = None

    @classmethod
    def of_tensors(cls, tensors: Iterable[tuple[str, Tensor]]) -> "WeightExport":
        """Return the export of named tensors, whole on this rank: those of `module.named_parameters()`, say."""
        return cls(BucketPiece(name, tuple(t.shape), t.dtype, 0, t.detach().reshape(-1)) for name, t in tensors)


class Trainer(Protocol):
    """Trainer of the policy. Every rank has one, and calls each method together with the others."""

    def train(self, step: int, episodes: Sequence[Episode]) -> TrainResult:
        """Train on the episodes of step number `step`, counted from 0."""
        ...

    def log_probs(self, batch: TensorDict) -> Sequence[Tensor]:
        """Return the log-probs of a batch by the present weights: float32 [length] for each row."""
        ...

    def export_weights(self, module_names: bool) -> WeightExport:
        """Return the present weights, named as the trained module names them, or as its checkpoint does."""
        ...


@runtime_checkable
class SharingTrainer(Protocol):
    """Trainer whose weights a sampler of the same process can compute with in place."""

    def shared_weights(self) -> Any:
        """Return the tensors as `rollout.SharingEngine` takes them.

        Raises:
            RuntimeError: they cannot be shared at present.
        """
        ...


@runtime_checkable
class ScoringTrainer(Protocol):
    """Trainer whose results have `sampler_difference`, which costs it nothing more."""

    measures_sampler: bool
    """True: it does."""


@runtime_checkable
class RowTrainer(Protocol):
    """Trainer of several ranks that needs no more rows on a rank than that rank trains."""

    trains_rows: bool
    """True: its `train` takes summaries too, and fetches what each rank trains (`schedules.rows.shared`)."""

    def train(self, step: int, episodes: Sequence[AnyEpisode]) -> TrainResult:
        """Train on the episodes of step number `step`, whole or by their summaries."""
        ...


@runtime_checkable
class OffloadingTrainer(Protocol):
    """Trainer that can leave the device while samplers use it."""

    def offloaded(self) -> AbstractContextManager[None]:
        """Keep the trainer's state in host memory while the block runs; collective."""
        ...


class Tasks(TaskSource, Protocol):
    """Tasks of a run. They are handed to every rank: picklable where there is more than one."""

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the factory of the environments that a row's episodes run in."""
        ...


def environment_of(tasks: object, task_id: str) -> str | None:
    """Return the environment that a task belongs to, or None where a run has one alone.

    Tasks of several have a part of each (`parts`), and their ids begin with the environment's name.
    """
    return task_id.partition("/")[0] if len(getattr(tasks, "parts", ())) > 1 else None


class SamplerSource(Protocol):
    """Maker of samplers. It is picklable: it makes one in this process, in another, or on another machine."""

    @property
    def module_names(self) -> bool:
        """Whether the sampler takes weights under the names of the trained module, not of its checkpoint."""
        ...

    def prepare_process(self) -> None:
        """Set threads, seeds and logging of a process that samples for the run."""
        ...

    def engine(self, version: int) -> RolloutEngine:
        """Return a sampler with the weights that the run began with, which count as number `version`."""
        ...

    def chat(self) -> Chat:
        """Return the chat format of the run's model."""
        ...

    def dtype(self, engine: RolloutEngine) -> str:
        """Return what the sampler computes in: "bfloat16", "float16" or "float32"."""
        ...


@runtime_checkable
class ProcessEngine(Protocol):
    """Sampler that is a process of its own, which may die."""

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        ...


@runtime_checkable
class StartingEngine(Protocol):
    """Sampler in a process of its own that may still be starting; it is closed as a context manager."""

    def wait_until_ready(self) -> None:
        """Wait until it can be asked; do nothing where it can. Raise what keeps it from starting."""
        ...


@runtime_checkable
class NumericEngine(Protocol):
    """Sampler that says which of its settings change its numbers."""

    @property
    def numerics(self) -> Mapping[str, str]:
        """The settings as NAME=VALUE, each with its kind: "weights" or "cache" (those are kept in fewer bits than its
        dtype has), or "rounding"."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """Sampler that can give the device's memory back while the trainer uses it."""

    async def sleep(self) -> None:
        """Give the memory back, once what runs is finished."""
        ...

    async def wake(self) -> None:
        """Take the memory again, with the newest weights."""
        ...


@runtime_checkable
class ReplicatedEngine(Protocol):
    """Sampler with several replicas of the model, each of which can be asked by itself."""

    @property
    def copies(self) -> Sequence[int]:
        """Numbers of the replicas that live."""
        ...

    @property
    def lost_copies(self) -> Any:
        """The replicas that died."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, media: Any, *, copy: int) -> Completion:
        """Sample one completion by replica number `copy`."""
        ...


@runtime_checkable
class TimedEngine(Protocol):
    """Sampler that measures its own weight syncs."""

    @property
    def transfer(self) -> Any:
        """Seconds and rate of the last one (`staged_s`, `paused_s`, `link_share`); None before it."""
        ...


@runtime_checkable
class DraftingEngine(Protocol):
    """Sampler whose tokens may be drafted (speculative decoding)."""

    def take_accepted(self) -> float | None:
        """Return how many drafted tokens a step accepted on average since the last call; None where nothing drafts."""
        ...


WaitFor = Callable[["Sequence[Any]"], object]
"""Returns once all futures have ended."""
