"""A discrete-event simulation of asynchronous training, driven by the very controller that drives a run.

The model, in virtual time:

1. A sampling replica decodes its completions side by side; a token of each takes `decode_s + row_s x completions`.
   Completions beyond `slots` wait. Each goes to the replica that has the fewest; a group ends with its last one.
2. A step takes `train_s + token_s x tokens / trainers`; a weight sync takes `sync_s`, in which nothing is sampled.
3. `StalenessController` decides which groups begin, what is trained and when weights are synced.

Left out: prompts, environments, the prefill of interrupted completions, and noise.
"""

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from rollout.control.settings import StalenessSettings
from rollout.control.staleness import Begin, Decision, Finished, StalenessController, Sync, Synced, Train, Trained

_NEVER = float("inf")


@dataclass(frozen=True)
class Workload:
    """What is sampled and how fast. `lengths`: tokens of completions, drawn from with equal chances.

    Seconds of one replica: `decode_s` a token whatever the batch is, `row_s` more for each completion. Seconds of one
    trainer: `train_s` a step, `token_s` a token. `sync_s` seconds a weight sync.
    """

    lengths: Sequence[int]
    group_size: int = 8
    slots: int = 256
    decode_s: float = 0.02
    row_s: float = 0.0001
    train_s: float = 0.0
    token_s: float = 0.0001
    sync_s: float = 0.1

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError("lengths are counts of tokens of at least one answer, each at least 1")
        if min(self.group_size, self.slots) < 1:
            raise ValueError(f"group_size and slots must be at least 1, got {self.group_size} and {self.slots}")
        if min(self.row_s, self.train_s, self.token_s, self.sync_s) < 0 or not self.decode_s > 0:
            raise ValueError("seconds must be at least 0, those of a token above 0")


class BusyInterval(NamedTuple):
    """An interval from `begin` to `end`, in seconds, in which a lane was busy with `kind`."""

    lane: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Forecast:
    """Result of a simulation: seconds of the whole run, tokens, the staleness of each step, and the busy intervals.

    Shares are of the whole time; `generating` is the mean over replicas.
    """

    generators: int
    trainers: int
    seconds: float
    tokens: int
    staleness: tuple[int, ...]
    generating: float
    training: float
    spans: tuple[BusyInterval, ...] = field(repr=False)

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over the whole run."""
        return self.tokens / self.seconds


def simulate(
    settings: StalenessSettings, workload: Workload, generators: int = 1, trainers: int = 1, seed: int = 0
) -> Forecast:
    """Run the controller through virtual time on `generators` replicas and `trainers` trainers, to its end.

    Equal seeds draw equal lengths for equal groups, whatever the pools are, so that forecasts can be compared.
    """
    if min(generators, trainers) < 1:
        raise ValueError(f"there is at least one of each, got {generators} generators and {trainers} trainers")
    return _Simulation(settings, workload, generators, trainers, seed).run()


def choose_pools(settings: StalenessSettings, workload: Workload, devices: int, seed: int = 0) -> list[Forecast]:
    """Return the forecasts of every split of `devices` into generators and trainers, the fastest first."""
    if devices < 2:
        raise ValueError(f"two pools need at least 2 devices, got {devices}")
    forecasts = [simulate(settings, workload, count, devices - count, seed) for count in range(1, devices)]
    return sorted(forecasts, key=lambda forecast: forecast.seconds)


def forecast_table(forecasts: Sequence[Forecast]) -> str:
    """Return forecasts as a table of text, one line each."""
    lines = ["generators  trainers   seconds  tokens/s  generating  training  staleness mean/max"]
    for f in forecasts:
        mean = sum(f.staleness) / len(f.staleness)
        lines.append(
            f"{f.generators:10d}  {f.trainers:8d}  {f.seconds:8.1f}  {f.tokens_per_second:8.0f}  {f.generating:10.0%}  "
            f"{f.training:8.0%}  {mean:9.2f} / {max(f.staleness)}"
        )
    return "\n".join(lines)


class _Replica:
    """Completions that decode side by side. `clock` counts the tokens of a completion that runs since the start."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._running: list[tuple[float, int]] = []
        self._waiting: deque[tuple[int, int]] = deque()
        self._clock = self._at = 0.0
        self.paused = False
        self.busy = 0.0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, group: int, length: int) -> None:
        self._waiting.append((length, group))
        self._fill()

    def advance(self, now: float) -> None:
        """Decode until `now`; no completion ends before it."""
        if self._running and not self.paused:
            self._clock += (now - self._at) / self._token_s
            self.busy += now - self._at
        self._at = now

    def next_end(self) -> float:
        if not self._running or self.paused:
            return _NEVER
        return self._at + max(0.0, self._running[0][0] - self._clock) * self._token_s

    def pop(self) -> int:
        """Return the group of the completion that ends now."""
        end, group = heapq.heappop(self._running)
        self._clock = max(self._clock, end)
        self._fill()
        return group

    @property
    def _token_s(self) -> float:
        return self._workload.decode_s + self._workload.row_s * len(self._running)

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._workload.slots:
            length, group = self._waiting.popleft()
            heapq.heappush(self._running, (self._clock + length, group))


class _Simulation:
    def __init__(
        self, settings: StalenessSettings, workload: Workload, generators: int, trainers: int, seed: int
    ) -> None:
        self.workload, self.trainers, self.seed = workload, trainers, seed
        self.controller = StalenessController(settings)
        self.replicas = [_Replica(workload) for _ in range(generators)]
        self.left: dict[int, int] = {}
        self.tokens: dict[int, int] = {}
        self.now, self.train_end, self.sync_end = 0.0, _NEVER, _NEVER
        self.trained_s = 0.0
        self.spans: list[BusyInterval] = []
        self.staleness: list[int] = []
        self.sampling_since: float | None = None

    def run(self) -> Forecast:
        self._obey(self.controller.begin())
        while not self.controller.done:
            ends = [replica.next_end() for replica in self.replicas]
            self.now = min(self.train_end, self.sync_end, *ends)
            assert self.now < _NEVER, "the controller waits for nothing"
            for replica in self.replicas:
                replica.advance(self.now)
            if self.now == self.sync_end:
                self.sync_end = _NEVER
                for replica in self.replicas:
                    replica.paused = False
                self._obey(self.controller.handle(Synced()))
            elif self.now == self.train_end:
                self.train_end = _NEVER
                self._obey(self.controller.handle(Trained()))
            else:
                self._answered(self.replicas[ends.index(self.now)].pop())
        busy = sum(replica.busy for replica in self.replicas) / len(self.replicas)
        return Forecast(
            len(self.replicas),
            self.trainers,
            self.now,
            sum(self.tokens.values()),
            tuple(self.staleness),
            busy / self.now,
            self.trained_s / self.now,
            tuple(self.spans),
        )

    def _answered(self, group: int) -> None:
        self.left[group] -= 1
        if self.left[group]:
            return
        del self.left[group]
        if not self.left:
            self._sampled()
        self._obey(self.controller.handle(Finished(group)))

    def _sampled(self) -> None:
        if self.sampling_since is not None and self.now > self.sampling_since:
            self.spans.append(BusyInterval("sampler", "sample", self.sampling_since, self.now))
        self.sampling_since = None

    def _obey(self, decisions: Sequence[Decision]) -> None:
        for decision in decisions:
            match decision:
                case Begin(group):
                    self._begin(group)
                case Train(_, groups, staleness):
                    tokens = sum(self.tokens[group] for group in groups)
                    seconds = self.workload.train_s + self.workload.token_s * tokens / self.trainers
                    self.staleness.append(staleness)
                    self.trained_s += seconds
                    self.train_end = self.now + seconds
                    self.spans.append(BusyInterval("trainer", "train", self.now, self.train_end))
                case Sync():
                    self.sync_end = self.now + self.workload.sync_s
                    self._sampled()
                    for replica in self.replicas:
                        replica.paused = True
                    self.spans.append(BusyInterval("weights", "sync", self.now, self.sync_end))
        if self.left and self.sync_end == _NEVER and self.sampling_since is None:
            self.sampling_since = self.now

    def _begin(self, group: int) -> None:
        draw = random.Random(f"{self.seed}/{group}")
        lengths = draw.choices(self.workload.lengths, k=self.workload.group_size)
        self.left[group], self.tokens[group] = len(lengths), sum(lengths)
        for length in lengths:
            min(self.replicas, key=lambda replica: replica.load).add(group, length)


def in_turn(settings: StalenessSettings) -> StalenessSettings:
    """Return the settings of the same run on a synchronous schedule: no group begins ahead."""
    return replace(settings, staleness_threshold=0.0, parameter_sync_step=1, partial_rollout=False)
