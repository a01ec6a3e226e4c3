"""Several copies of a model, each in a vLLM of its own: all say what the module says, and the same weights' words."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.errors import EpisodeFailed
from rollout.testing.processes import assert_ends
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import (
    ANSWER,
    MEAN,
    PROMPTS,
    VERSIONS,
    assert_agrees,
    changed,
    config,
    distances,
    pieces,
    sample,
    served,
)

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
LONG = Sampling(max_new_tokens=1000)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("model")
    served().save_pretrained(folder)
    with VllmEngine(folder, config(data_parallel=2)) as engine:
        yield engine


def update(engine: VllmEngine, model: PreTrainedModel) -> None:
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(model)))


def of_copy(engine: VllmEngine, copy: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Completion]:
    async def ask() -> list[Completion]:
        return await asyncio.gather(
            *[engine.generate(p, replace(ANSWER, seed=i), copy=copy) for i, p in enumerate(prompts)]
        )

    return asyncio.run(ask())


def test_each_copy_has_the_modules_log_probs_before_and_after_an_update(engine: VllmEngine) -> None:
    assert len(set(engine.pids)) == 2
    old = [of_copy(engine, copy) for copy in (0, 1)]
    assert [done.ids for done in old[0]] == [done.ids for done in old[1]]
    new = changed(served())
    update(engine, new)
    for copy in (0, 1):
        assert_agrees(served(), PROMPTS, old[copy])
        done = of_copy(engine, copy)
        assert_agrees(new, PROMPTS, done)
        assert distances(new, PROMPTS, old[copy]).mean() > 5 * MEAN
        assert {version for one in done for version in one.policy_versions} == {engine.version}


def test_requests_are_shared_out(engine: VllmEngine) -> None:
    """Twenty long ones at once: neither copy has all of them."""
    seen: list[tuple[int, dict[str, Any]]] = []
    usual = engine._replicas.send

    def noted(copy: int, message: dict[str, Any], tail: Sequence[memoryview] = ()) -> None:
        seen.append((copy, message))
        usual(copy, message, tail)

    engine._replicas.send = noted  # type: ignore[method-assign]
    try:
        sample(engine, [[3 + i, 5] for i in range(20)])
    finally:
        del engine._replicas.send
    assert [sum(len(m["ask"]) for c, m in seen if c == copy and "ask" in m) for copy in (0, 1)] == [10, 10]


@pytest.mark.parametrize("copy", [0, 1])
def test_all_copies_keep_the_old_weights_where_one_does_not_take_the_new(engine: VllmEngine, copy: int) -> None:
    """Requests run through it: no token is of the weights that were given up."""
    update(engine, served())
    version, coming = engine.version, next(VERSIONS)
    usual = engine._replicas.send

    def to_nowhere(to: int, message: dict[str, Any], tail: Sequence[memoryview] = ()) -> None:
        if to == copy and "load" in message and message["load"]["before"] is not None:
            message = {"load": message["load"] | {"path": "/proc/self/fd/none"}}
        usual(to, message, tail)

    async def run() -> list[Completion]:
        begun = [asyncio.Event(), asyncio.Event()]
        how = Sampling(max_new_tokens=600)
        tasks = [
            asyncio.create_task(engine.generate(PROMPTS[0], how, copy=to, on_tokens=lambda *_, to=to: begun[to].set()))
            for to in (0, 1)
        ]
        await asyncio.gather(*[event.wait() for event in begun])
        engine._replicas.send = to_nowhere  # type: ignore[method-assign, assignment]
        try:
            with pytest.raises(RuntimeError, match=f"^copy {copy} of 2: RuntimeError: unable to open file"):
                await engine.update_weights(coming, pieces(changed(served())))
        finally:
            del engine._replicas.send
        return await asyncio.gather(*tasks)

    running = asyncio.run(run())
    assert engine.version == version
    assert {v for done in running for v in done.policy_versions} == {version}
    assert_agrees(served(), [PROMPTS[0]] * 2, running)
    for to in (0, 1):
        assert_agrees(served(), PROMPTS, of_copy(engine, to))
    new = changed(served(), seed=3)
    update(engine, new)
    for to in (0, 1):
        assert_agrees(new, PROMPTS, of_copy(engine, to))


def test_a_dead_copys_requests_may_be_asked_again_and_the_others_go_on_to_the_last(engine: VllmEngine) -> None:
    """The last test of this engine."""
    update(engine, served())

    async def begin(copy: int) -> "asyncio.Task[Completion]":
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, copy=copy, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        return task

    async def run() -> PreTrainedModel:
        dying, living = await begin(1), await begin(0)
        os.kill(engine.pids[1], signal.SIGKILL)
        with pytest.raises(EpisodeFailed, match=r"copy 1 of 2 is gone: vLLM's process .* ended with code -9") as failed:
            await dying
        assert failed.value.retryable
        assert len((await living).ids) == 1000
        assert engine.alive
        assert engine.copies == [0]
        assert "ended with code -9" in engine.lost_copies[1]
        new = changed(served(), seed=2)
        await engine.update_weights(next(VERSIONS), pieces(new))
        return new

    new = asyncio.run(run())
    assert_agrees(new, PROMPTS, sample(engine, PROMPTS))

    async def end() -> None:
        dying = await begin(0)
        os.kill(engine.pids[0], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            await dying
        with pytest.raises(RuntimeError, match="ended with code -9"):
            await engine.generate(PROMPTS[0], ANSWER)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            await engine.update_weights(next(VERSIONS), pieces(served()))

    sessions = [os.getsid(pid) for pid in engine.pids[:1]]
    asyncio.run(end())
    assert not engine.alive
    for session in sessions:
        assert_ends(session)


def test_copies_of_models_that_are_spread_over_workers(tmp_path: Path) -> None:
    """Two copies of two workers each."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    old, new = served(**heads), served(seed=1, **heads)
    old.save_pretrained(tmp_path)
    with VllmEngine(tmp_path, config(data_parallel=2, tensor_parallel=2)) as engine:
        for copy in (0, 1):
            assert_agrees(old, PROMPTS, of_copy(engine, copy))
        update(engine, new)
        for copy in (0, 1):
            assert_agrees(new, PROMPTS, of_copy(engine, copy))
