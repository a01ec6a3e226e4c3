"""The engine while it runs: pauses, cancels and deadlines at any moment, weights swapped under way, threads, errors."""

import asyncio
import copy
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.config import DecoderChoice
from rollout.engine import Completion, Sampling
from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import buckets
from rollout.testing.model import tiny_dense_model, tiny_model
from rollout.testing.pieces import pieces_of

VOCAB = 48
OLD, NEW = tiny_model(VOCAB, layers=2), tiny_model(VOCAB, layers=2, seed=5)
LONG = Sampling(max_new_tokens=240, seed=1)


@pytest.fixture
def engine() -> NativeEngine:
    return NativeEngine(copy.deepcopy(OLD))


async def decoded(engine: NativeEngine, steps: int = 3) -> None:
    """Wait until so many more steps have been decoded."""
    before = engine.decode_steps
    while engine.decode_steps < before + steps:
        await asyncio.sleep(0.001)


def settled(engine: NativeEngine) -> bool:
    """Whether nobody runs or waits, once what was posted is done."""
    end = time.monotonic() + 30
    while engine._thread.awake and time.monotonic() < end:
        time.sleep(0.001)
    return not engine._batch.running and not engine._batch.waiting and not len(engine._open)


@torch.no_grad()
def log_prob(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], at: int) -> float:
    logits = model(input_ids=torch.tensor([[*prompt, *ids[:at]]]), use_cache=False).logits[0, -1].double()
    found: float = torch.log_softmax(logits, -1)[ids[at]].item()
    return found


def test_who_waits_behind_a_pause_can_be_cancelled_or_run_out_of_time(engine: NativeEngine) -> None:
    async def play() -> tuple[tuple[Any, ...], Completion]:
        await engine.pause()
        cancelled = asyncio.create_task(engine.generate([3], LONG, request_id="a"))
        late = asyncio.create_task(engine.generate([3], LONG, deadline=time.monotonic() + 0.05))
        gone = asyncio.create_task(engine.generate([3], LONG))
        stays = asyncio.create_task(engine.generate([3], Sampling(max_new_tokens=2)))
        await asyncio.sleep(0.01)
        assert await engine.cancel("a")
        gone.cancel()
        first = await asyncio.gather(cancelled, late, gone, return_exceptions=True)
        assert not stays.done()
        await engine.resume()
        return first, await stays

    (cancelled, late, gone), stays = asyncio.run(play())
    assert (cancelled.stop_reason, cancelled.ids) == ("abort", ())
    assert (late.stop_reason, late.ids) == ("deadline", ())
    assert isinstance(gone, asyncio.CancelledError)
    assert len(stays.ids) == 2
    assert engine.decode_steps == 1  # nobody else was ever decoded
    assert settled(engine)


def test_a_pause_lets_what_runs_finish_and_holds_what_comes(engine: NativeEngine) -> None:
    async def play() -> None:
        running = asyncio.create_task(engine.generate([3], Sampling(max_new_tokens=40, seed=1)))
        await decoded(engine)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate([4], Sampling(max_new_tokens=2)))
        await pausing
        assert engine.decode_steps == 39
        assert len((await running).ids) == 40
        await asyncio.sleep(0.02)
        assert not late.done()
        await engine.resume()
        assert len((await late).ids) == 2

    asyncio.run(play())


def test_a_pause_that_is_cancelled_holds_nobody(engine: NativeEngine) -> None:
    async def play() -> Completion:
        running = asyncio.create_task(engine.generate([3], LONG, request_id="a"))
        await decoded(engine)
        pausing = asyncio.create_task(engine.pause())
        await asyncio.sleep(0.005)
        pausing.cancel()
        done = await engine.generate([4], Sampling(max_new_tokens=2))
        await engine.cancel("a")
        await running
        return done

    assert len(asyncio.run(play()).ids) == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_weights_are_swapped_under_way(recompute: bool) -> None:
    engine = NativeEngine(copy.deepcopy(OLD), on_commit="recompute" if recompute else "keep")

    async def play() -> Completion:
        running = asyncio.create_task(engine.generate([3, 4], LONG))
        await decoded(engine, 5)
        await engine.update_weights(3, pieces_of(NEW.named_parameters(), max_elements=100))
        return await running

    done = asyncio.run(play())
    versions = list(done.policy_versions)
    assert versions == sorted(versions)
    assert set(versions) == {0, 3}
    errors = [
        abs(p - log_prob(OLD if v == 0 else NEW, [3, 4], done.ids, at))
        for at, (p, v) in enumerate(zip(done.log_probs, versions, strict=True))
    ]
    first = versions.index(3)
    assert max(errors[:first]) < 1e-5
    assert (max(errors[first:]) < 1e-4) == recompute


def test_a_commit_can_be_taken_back_under_way(engine: NativeEngine) -> None:
    async def play() -> Completion:
        running = asyncio.create_task(engine.generate([3, 4], LONG, request_id="a"))
        await decoded(engine)
        await engine.prepare(Manifest(7))
        missing = [await engine.receive(b) for b in buckets(pieces_of(NEW.named_parameters()), 10_000)]
        assert missing[-1] == 0
        await decoded(engine)  # staging holds nobody up
        await engine.commit(7)
        assert engine.version == 7
        await decoded(engine)
        await engine.abort()
        assert engine.version == 0
        await decoded(engine)
        await engine.cancel("a")
        return await running

    done = asyncio.run(play())
    assert [v for i, v in enumerate(done.policy_versions) if i == 0 or done.policy_versions[i - 1] != v] == [0, 7, 0]
    after = engine.generate_batch([[3, 4]], Sampling(max_new_tokens=8, seed=1))[0]
    assert after.ids == NativeEngine(OLD).generate_batch([[3, 4]], Sampling(max_new_tokens=8, seed=1))[0].ids


def test_weights_that_are_not_finite_change_nothing_and_hold_nobody(engine: NativeEngine) -> None:
    bad = copy.deepcopy(NEW)
    with torch.no_grad():
        bad.model.layers[1].mlp.up_proj.weight[3, 3] = float("nan")

    async def play() -> Completion:
        running = asyncio.create_task(engine.generate([3, 4], LONG))
        await decoded(engine)
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
            await engine.update_weights(1, pieces_of(bad.named_parameters()))
        return await running

    done = asyncio.run(play())
    assert set(done.policy_versions) == {0}
    assert done.ids == NativeEngine(OLD).generate_batch([[3, 4]], LONG)[0].ids


def test_the_synchronous_core_shares_the_batch(engine: NativeEngine) -> None:
    found: list[Completion] = []

    async def play() -> tuple[Completion, list[Completion]]:
        running = asyncio.create_task(engine.generate([3, 4], LONG))
        await decoded(engine)
        settings = [Sampling(max_new_tokens=9, seed=i) for i in range(3)]
        thread = threading.Thread(target=lambda: found.extend(engine.generate_batch([[5], [6, 7], [8]], settings)))
        thread.start()
        done = await running
        await asyncio.to_thread(thread.join, 30)
        return done, NativeEngine(OLD).generate_batch([[5], [6, 7], [8]], settings)

    done, expected = asyncio.run(play())
    assert done.ids == NativeEngine(OLD).generate_batch([[3, 4]], LONG)[0].ids
    assert [c.ids for c in found] == [c.ids for c in expected]


def test_a_loop_that_ends_leaves_nobody_in_a_slot(engine: NativeEngine) -> None:
    async def leave() -> None:
        tasks = [asyncio.create_task(engine.generate([3 + i], LONG, request_id=str(i))) for i in range(3)]
        await decoded(engine)
        assert len(tasks) == 3

    asyncio.run(leave())
    assert settled(engine)
    assert engine.decode_steps < 200
    assert len(asyncio.run(engine.generate([3], Sampling(max_new_tokens=2), request_id="0")).ids) == 2


def test_a_broken_step_is_everyones_error_once(engine: NativeEngine) -> None:
    step = engine._batch.decoder.step
    calls: list[int] = []

    def broken(tokens: torch.Tensor) -> torch.Tensor:
        calls.append(len(tokens))
        if len(calls) == 4:
            raise RuntimeError("the device is gone")
        return step(tokens)

    engine._batch.decoder.step = broken  # type: ignore[method-assign]

    async def play() -> tuple[list[Completion | BaseException], Completion]:
        asked = [engine.generate([3 + i], Sampling(max_new_tokens=20)) for i in range(3)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        return failed, await engine.generate([3], Sampling(max_new_tokens=3))

    failed, after = asyncio.run(play())
    assert all(isinstance(e, RuntimeError) and "gone" in str(e) for e in failed)
    assert len(after.ids) == 3
    assert settled(engine)


@pytest.mark.parametrize("model", [OLD, tiny_dense_model(VOCAB)], ids=["hybrid", "dense"])
@pytest.mark.parametrize("decoder", ["lean", "module"])
def test_arrivals_from_many_tasks_get_what_they_get_alone(decoder: DecoderChoice, model: PreTrainedModel) -> None:
    engine = NativeEngine(copy.deepcopy(model), max_batch=5, decoder=decoder)
    prompts = [[3 + i % 4] * (1 + i % 7) for i in range(24)]
    settings = [
        Sampling(max_new_tokens=1 + i % 9, greedy=True) if i % 2 else Sampling(max_new_tokens=1 + i % 9, seed=i)
        for i in range(24)
    ]

    async def one(i: int) -> Completion:
        await asyncio.sleep(0.002 * (i % 5))
        return await engine.generate(prompts[i], settings[i])

    async def play() -> list[Completion]:
        return await asyncio.gather(*(one(i) for i in range(24)))

    done = asyncio.run(play())
    alone = NativeEngine(model, decoder=decoder)
    for prompt, how, completion in zip(prompts, settings, done, strict=True):
        assert completion.ids == alone.generate_batch([prompt], how)[0].ids
    assert settled(engine)


@pytest.mark.parametrize("model", [OLD, tiny_dense_model(VOCAB)], ids=["hybrid", "dense"])
def test_greedy_ids_are_those_of_generate_and_log_probs_of_a_forward_pass(model: PreTrainedModel) -> None:
    prompts = [[3], [9] * 20, list(range(2, 13)), [4, 5]]
    done = NativeEngine(model, decoder="lean").generate_batch(prompts, Sampling(max_new_tokens=24, greedy=True))
    for prompt, completion in zip(prompts, done, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, do_sample=False, max_new_tokens=24, min_new_tokens=24, eos_token_id=None)
        assert list(completion.ids) == whole[0, len(prompt) :].tolist()
        with torch.no_grad():
            log_probs = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = log_probs.gather(-1, whole[0, len(prompt) :, None])[:, 0]
        assert (torch.tensor(completion.log_probs) - expected).abs().max() < 1e-5


def test_choices_are_checked() -> None:
    with pytest.raises(ValueError, match="decoder is"):
        NativeEngine(OLD, decoder="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="on_commit is"):
        NativeEngine(OLD, on_commit="forget")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="prefill_tokens"):
        NativeEngine(OLD, prefill_tokens=0)
    with pytest.raises(ValueError, match="compact_below"):
        NativeEngine(OLD, compact_below=1.5)
