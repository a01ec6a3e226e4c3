"""Requests in rounds: equal traffic gives equal bits, however fast the decoding thread is."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.episodes.runner import run_group
from rollout.native.engine import NativeEngine
from rollout.native.scheduler import gang_scheduling
from rollout.native.scheduler.request import SequenceRequest
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model

VOCAB = 24
SAMPLING = Sampling(max_new_tokens=12, stop_token_ids=(1, 2, 3))


def engine_of(admit: Literal["any_step", "rounds"] = "rounds") -> NativeEngine:
    torch.set_num_threads(1)
    return NativeEngine(tiny_model(VOCAB, layers=2, seed=0), admit=admit)


def slowed(engine: NativeEngine, seed: int) -> list[tuple[int, ...]]:
    """Make steps take a random time; the list of who decoded together, step by step, by their seeds."""
    delays, step = random.Random(seed), engine._batch.step
    together: list[tuple[int, ...]] = []

    def slow_step() -> None:
        time.sleep(delays.choice([0, 0, 0.004]))
        step()
        running = tuple(sorted(request.seed for request in engine._batch.running))
        if running:
            together.append(running)

    engine._batch.step = slow_step  # type: ignore[method-assign]
    return together


async def conversation(engine: NativeEngine, number: int, turns: int = 3) -> tuple[list[int], list[float]]:
    """Each turn goes on from the tokens of the last one, at once."""
    ids, log_probs = [4, 5 + number % 7], list[float]()
    for turn in range(turns):
        done = await engine.generate(ids, replace(SAMPLING, seed=100 * number + turn))
        ids = [*ids, *done.ids, 4]
        log_probs += done.log_probs
    return ids, log_probs


async def traffic(engine: NativeEngine) -> list[tuple[list[int], list[float]]]:
    return await asyncio.gather(*(conversation(engine, number) for number in range(9)))


def test_equal_traffic_gives_equal_bits_whatever_the_thread_does() -> None:
    found = []
    for seed in range(4):
        engine = engine_of()
        together = slowed(engine, seed)
        found.append((asyncio.run(traffic(engine)), together))
    assert all(other == found[0] for other in found[1:])


def test_what_another_phase_kept_does_not_decide_a_runs_bits() -> None:
    """An evaluation before the traffic, of the same first prompts, leaves nothing that its turns could go on from."""

    async def evaluated_first(engine: NativeEngine) -> list[tuple[list[int], list[float]]]:
        await asyncio.gather(*(conversation(engine, number, turns=1) for number in range(9)))
        return await traffic(engine)

    fresh, after = engine_of(), engine_of()
    assert asyncio.run(traffic(fresh)) == asyncio.run(evaluated_first(after))
    assert fresh.num_prefill_tokens < after.num_prefill_tokens <= 2 * fresh.num_prefill_tokens


def test_turns_of_a_round_go_on_from_what_is_kept() -> None:
    keeps, reads = engine_of(), NativeEngine(tiny_model(VOCAB, layers=2, seed=0), admit="rounds", keep_tokens=0)
    (kept, whole) = (asyncio.run(traffic(engine)) for engine in (keeps, reads))
    assert [ids for ids, _ in kept] == [ids for ids, _ in whole]
    assert keeps.num_prefill_tokens < reads.num_prefill_tokens


def test_who_asks_while_a_round_runs_begins_with_the_next() -> None:
    async def main() -> None:
        engine = engine_of()
        order: list[str] = []

        async def ask(name: str, tokens: int) -> None:
            await engine.generate([4, 5], Sampling(max_new_tokens=tokens, seed=tokens))
            order.append(name)

        first = asyncio.create_task(ask("long", 30))
        await asyncio.sleep(0.02)
        await asyncio.gather(first, ask("short", 1))
        assert order == ["long", "short"]

    asyncio.run(main())


def test_a_request_that_waits_for_its_round_can_be_ended() -> None:
    async def main() -> None:
        engine = engine_of()
        long = asyncio.create_task(engine.generate([4, 5], Sampling(max_new_tokens=200, seed=0)))
        await asyncio.sleep(0.02)
        waiting = asyncio.create_task(engine.generate([4, 6], Sampling(max_new_tokens=5, seed=1), request_id="a"))
        late = asyncio.create_task(engine.generate([4, 6], SAMPLING, deadline=time.monotonic() - 1))
        gone = asyncio.create_task(engine.generate([4, 7], Sampling(max_new_tokens=5, seed=2)))
        await asyncio.sleep(0)
        assert await engine.cancel("a")
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert (await waiting).stop_reason == "abort"
        assert (await late).stop_reason == "deadline"
        assert len((await long).ids) == 200
        assert (await engine.generate([4, 5], SAMPLING)).ids

    asyncio.run(main())


def test_another_loop_starts_anew() -> None:
    engine = engine_of()

    async def leave() -> None:
        task = asyncio.create_task(engine.generate([4, 5], Sampling(max_new_tokens=50, seed=0)))
        await asyncio.sleep(0.01)
        del task

    asyncio.run(leave())
    assert asyncio.run(engine.generate([4, 5], SAMPLING)).ids


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match='admit is "any_step" or "rounds", got "now"'.replace('"now"', "'now'")):
        engine_of("now")  # type: ignore[arg-type]


def begun_by(engine: NativeEngine) -> list[int]:
    """How many requests each round has, as they begin."""
    assert engine._rounds is not None
    sizes, add = list[int](), engine._rounds._begin

    def counted(requests: list[SequenceRequest]) -> None:
        sizes.append(len(requests))
        add(requests)

    engine._rounds._begin = counted
    return sizes


async def episode(
    engine: NativeEngine, number: int, wait: Callable[[], float], turns: int = 3
) -> tuple[list[int], list[float]]:
    """A conversation whose environment takes `wait()` seconds before the first turn and after each."""
    with engine.request_scope():
        ids, log_probs = [4, 5 + number % 7], list[float]()
        for turn in range(turns):
            await asyncio.sleep(wait())
            done = await engine.generate(ids, replace(SAMPLING, seed=100 * number + turn))
            ids = [*ids, *done.ids, 4]
            log_probs += done.log_probs
        return ids, log_probs


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a round waits for those who are yet to ask."""
    monkeypatch.setattr(gang_scheduling, "PATIENCE", 60.0)


def test_slow_environments_split_no_round(patient: None) -> None:
    """However long each takes, those under way begin together, and equal traffic gives equal bits."""
    found: list[Any] = []
    sizes: list[list[int]] = []
    for seed in range(3):
        engine, delays = engine_of(), random.Random(seed)
        sizes.append(begun_by(engine))

        def wait(delays: random.Random = delays) -> float:
            return delays.choice([0, 0, 0.04, 0.16])

        async def play(
            engine: NativeEngine = engine, wait: Callable[[], float] = wait
        ) -> list[tuple[list[int], list[float]]]:
            return await asyncio.gather(*(episode(engine, number, wait, turns=2 + number % 2) for number in range(9)))

        found.append(asyncio.run(play()))
    assert sizes == [[9, 9, 4]] * 3  # the last round: those with a third turn
    assert found == [found[0]] * 3


def test_who_hangs_is_not_waited_for_and_who_is_gone_neither() -> None:
    async def main() -> None:
        engine = engine_of()
        sizes = begun_by(engine)
        hung = asyncio.create_task(episode(engine, 0, lambda: 3600.0))
        gone = asyncio.create_task(episode(engine, 1, lambda: 3600.0))
        others = [asyncio.create_task(episode(engine, number, lambda: 0.0)) for number in range(2, 6)]
        await asyncio.gather(*others)
        assert sizes == [4, 4, 4]
        hung.cancel()
        gone.cancel()
        await asyncio.gather(hung, gone, return_exceptions=True)
        assert engine._rounds is not None
        assert engine._rounds._present == 0

    asyncio.run(main())


def test_episodes_of_the_generator_are_waited_for(patient: None) -> None:
    """Two turns each, with an answer that comes at another time for each."""
    tokenizer = tiny_tokenizer()
    engine = NativeEngine(tiny_model(len(tokenizer), layers=2, seed=0), admit="rounds")
    sizes = begun_by(engine)

    class Slow:
        instant = True

        def __init__(self) -> None:
            self.turn = 0

        async def open(self, context: EpisodeContext) -> Observation:
            self.index = context.index
            return Observation([{"role": "user", "content": f"{context.index}"}])

        async def step(self, reply: Reply) -> StepResult:
            self.turn += 1
            await asyncio.sleep(0.08 * (self.index % 3))
            return StepResult(({"role": "user", "content": "again"},), done=self.turn == 2)

        async def finish(self, end: End) -> Score:
            await asyncio.sleep(0.02 * self.index)  # who is scored asks no more
            return Score(1.0)

        async def close(self) -> None:
            pass

    sampling = Sampling(max_new_tokens=200, stop_token_ids=tuple(range(len(tokenizer))))  # whatever it says, it ends
    played = asyncio.run(run_group(Slow, engine, Chat(tokenizer), sampling, size=6))
    assert [e.error for e in played] == [None] * 6
    assert sizes == [6, 6]
