"""Groups without signal are replaced by the next ones: against a plain loop over the tasks, and in schedules that end
and go on."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout import Chat, Episode, NativeEngine, RolloutLedger, RowSource, Sampling, Task, TaskRow
from rollout.environments.environment import Score
from rollout.episodes.codec import encode_episodes
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_dense_model
from schedules.config import FilterGroups
from schedules.one_step_off import OneStepOffSchedule
from schedules.protocols import TrainResult, WeightExport
from schedules.runtime.interrupts import Runner
from schedules.sampling.pass_rates import PassRates
from schedules.sampling.refill import DROPPED, DROPPED_TOKENS, GEN_BATCHES, SKIPPED, GroupFilter, Rounds, has_signal
from schedules.sampling.session import RolloutSession
from schedules.sampling.settings import RolloutSettings, RunState
from schedules.sync import SyncSchedule

TOKENIZER = tiny_tokenizer()
MODEL = tiny_dense_model(len(TOKENIZER))


def settings(**filtered: Any) -> RolloutSettings:
    return RolloutSettings(3, 2, Sampling(max_new_tokens=8, seed=0), filter_groups=FilterGroups(True, **filtered))


def group(number: int, *rewards: float | None, row: str = "", **components: Sequence[float]) -> list[Episode]:
    def score(at: int, reward: float) -> Score:
        return Score(reward, {name: values[at] for name, values in components.items()})

    return [
        Episode(f"{row}#{at}", row, 1, (), None, "failed", error="broken", group=number)
        if reward is None
        else Episode(f"{row}#{at}", row, 1, (), score(at, reward), "done", group=number)
        for at, reward in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "components", "signal"),
    [
        ((0.0, 1.0), {}, {"reward": True, "any": True}),
        ((0.5, 0.5), {}, {"reward": False, "any": False}),
        ((None, 1.0), {}, {"reward": False, "any": False}),
        ((None, None), {}, {"reward": False, "any": False}),
        ((1.0, 1.0), {"form": (0, 1)}, {"reward": False, "any": True, "form": True}),
        ((0.0, 1.0), {"form": (1, 1)}, {"reward": True, "any": True, "form": False}),
    ],
)
def test_a_group_has_signal_where_its_rewards_differ(rewards: Any, components: Any, signal: dict[str, bool]) -> None:
    found = group(0, *rewards, **components)
    assert {metric: has_signal(found, metric) for metric in signal} == signal
    if rewards[0] is not None:
        turns = [replace(one, score=Score(1.0, turn_rewards=(0.0, 2.0))) for one in found]
        assert [has_signal(turns, metric) for metric in ("reward", "any")] == [False, True]
        with pytest.raises(ValueError, match=r"--filter-groups.metric acc: no such reward component; there are: "):
            has_signal(found, "acc")


class Numbered(RowSource):
    """Tasks that answer to their number; in order."""

    def __init__(self, count: int) -> None:
        super().__init__("n", [TaskRow(str(n)) for n in range(count)], seed=1)

    def environment(self, row: TaskRow) -> Any:
        """Return a task with signal unless its number is a multiple of 3."""
        silent = int(row.id) % 3 == 0
        return Task(
            ({"role": "user", "content": f"say {row.id}"},),
            reward=lambda reply, results: 0.0 if silent else crc32(reply.content.encode()) / 1e9,
            cut_off_reward=None,
        )


@given(signals=st.lists(st.booleans(), min_size=40, max_size=40), steps=st.integers(1, 4), most=st.integers(1, 5))
def test_rounds_against_a_plain_loop(signals: list[bool], steps: int, most: int) -> None:
    """Each step: the next tasks with signal, but in the last round, whose groups are taken as they are."""
    order = [row.id for row in Numbered(40).tasks(0, 40)]
    tasks: Any = Numbered(40)
    rounds = Rounds(tasks, settings(max_num_gen_batches=most), RunState(Path(), steps))

    def play(number: int, rows: Sequence[TaskRow], final: bool) -> list[Episode]:
        played = [group(at, 0.0, float(signals[int(row.id)]), row=row.id) for at, row in enumerate(rows)]
        return [episode for found in played for episode in found]

    at = 0
    for _ in range(steps):
        filled, expected, asked = rounds.step(play), list[str](), 0
        for number in range(1, most + 1):
            asks = [order[n % 40] if n < 40 else None for n in range(at, at + 3 - len(expected))]
            if None in asks:
                return  # the second pass has an order of its own
            at, asked = at + len(asks), asked + len(asks)
            expected += [row for row in asks if row is not None and (signals[int(row)] or number == most)]
            if len(expected) == 3:
                break
        assert [row.id for row in filled.rows] == expected
        assert [(e.group, e.task_id) for e in filled.episodes] == [(n, t) for n, t in enumerate(expected) for _ in "ab"]
        assert filled.metrics == {GEN_BATCHES: number, DROPPED: asked - 3, DROPPED_TOKENS: 0, SKIPPED: 0}


def test_groups_that_end_one_by_one(tmp_path: Path) -> None:
    """At most (max_num_gen_batches - 1) times the step's groups are left out before the next step."""
    found, row = GroupFilter(settings(max_num_gen_batches=2), 2, tmp_path), TaskRow("a")
    same, mixed = encode_episodes(group(0, 1.0, 1.0)), encode_episodes(group(0, 1.0, 0.0))
    assert [found.drops(row, payload) for payload in (same, mixed, same, same)] == [True, False, True, False]
    assert found.metrics() == {GEN_BATCHES: 2.0, DROPPED: 2.0, DROPPED_TOKENS: 0.0, SKIPPED: 0.0}
    assert found.drops(row, same)
    off = GroupFilter(RolloutSettings(3, 2, Sampling()), 2, tmp_path)
    assert (off.drops(row, same), off.skips(row), off.metrics()) == (False, False, {})
    assert not list(tmp_path.iterdir())


def test_pools_ask_a_share_of_what_was_too_easy_or_too_hard_again(tmp_path: Path) -> None:
    """By the newest earlier visit, the same after a restart, also where the last line lacks its end."""
    pools = FilterGroups(True, easy_threshold=0.9, easy_fraction=0.25, hard_fraction=0.5)
    rates = PassRates(pools, tmp_path, 3)
    for n in range(900):
        rewards = ((1.0, 1.0), (0.0, 0.0), (0.0, 1.0))[n % 3]
        rates.note(TaskRow(str(n), visit=1), group(0, *rewards))
    rates.note(TaskRow("failed", visit=1), group(0, None))
    skipped = {(n, visit) for n in range(900) for visit in (0, 1, 2) if rates.skips(TaskRow(str(n), visit=visit))}
    assert {visit for _, visit in skipped} == {2}
    shares = [fmean((n, 2) in skipped for n in range(kind, 900, 3)) for kind in range(3)]
    assert shares == pytest.approx([0.75, 0.5, 0.0], abs=0.09)
    with (tmp_path / "pass_rates.jsonl").open("a") as file:
        file.write('\n{"task": "0", "visit": 1, "rou')
    again = PassRates(pools, tmp_path, 3)
    assert {n for n in range(900) if again.skips(TaskRow(str(n), visit=2))} == {n for n, _ in skipped}
    again.note(TaskRow("0", visit=2), group(0, 0.0, 1.0))
    assert not PassRates(pools, tmp_path, 3).skips(TaskRow("0", visit=3))


class Still:
    """A trainer of whom only its calls matter."""

    def __init__(self) -> None:
        self.model = deepcopy(MODEL)

    def log_probs(self, batch: Any) -> Any:
        raise AssertionError("the sampler computes with weights of its own process")

    def train(self, step: int, episodes: Sequence[Episode]) -> TrainResult:
        return TrainResult({}, [0.0] * len(episodes), 0.0)

    def export_weights(self, module_names: bool) -> WeightExport:
        return WeightExport.of_tensors(self.model.named_parameters())


class Measured(Still):
    measures_sampler = True


@pytest.mark.parametrize("kind", [SyncSchedule, OneStepOffSchedule])
@pytest.mark.parametrize("hard", [1.0, 0.01])
def test_a_schedule_trains_each_task_with_signal_once_and_goes_on_so(tmp_path: Path, kind: Any, hard: float) -> None:
    """Ended after each step, with and without a checkpoint, and gone on with; in three passes over nine tasks, of which
    a hard pool leaves those without signal out."""
    order = [row.id for row in Numbered(9).tasks(0, 27) if int(row.id) % 3]
    engine = NativeEngine(deepcopy(MODEL), pad_token_id=0, decoder="module", admit="rounds")
    trained: dict[int, list[str]] = {}
    dropped = skipped = 0.0

    def go(done: int, stop: int, save: bool) -> None:
        nonlocal dropped, skipped
        with Runner() as runner:
            tasks: Any = Numbered(9)
            session = RolloutSession(settings(hard_fraction=hard), tasks, Chat(TOKENIZER), engine, runner)
            with kind(session, Measured(), RunState(tmp_path, 5, done)) as schedule:
                for step in range(done, stop):
                    result = schedule.step(step)
                    trained[step] = [row.id for row in result.rows]
                    assert [e.task_id for e in result.episodes] == [t for t in trained[step] for _ in "ab"]
                    dropped, skipped = dropped + result.metrics[DROPPED], skipped + result.metrics[SKIPPED]
                if save:
                    schedule.saving(stop)
                    schedule.saved(stop)

    go(0, 2, False)
    go(0, 1, True)
    go(1, 3, True)
    go(3, 4, False)
    go(3, 5, True)
    assert [task for step in range(5) for task in trained[step]] == order[:15]
    assert (dropped > 3, skipped > 3) == (True, hard < 1)
    if kind is OneStepOffSchedule:
        with RolloutLedger(tmp_path / "ledger-0.bin") as ledger:
            rounds = json.loads((tmp_path / "tasks.json").read_text())["5"]["round"]
            assert ledger.state.done.pairs() == [0, rounds]  # some without signal, and none is left over
