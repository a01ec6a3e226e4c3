"""vLLM over several workers: one model in two processes says what the module says, and nothing of it stays behind.

The last test of each engine ends it by a kill.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.testing.processes import abandoned, alive_processes, assert_ends, leftover_files
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import (
    ANSWER,
    HEADS,
    MEAN,
    PROMPTS,
    VERSIONS,
    assert_agrees,
    config,
    distances,
    pieces,
    sample,
    served,
    served_mixture,
)
from rollout.vllm.weights.shared_weights import checkpoint_pieces

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
LONG = Sampling(max_new_tokens=1000)


def dense(seed: int = 0) -> PreTrainedModel:
    return served(seed=seed, **HEADS)


@pytest.fixture(scope="module")
def files() -> set[str]:
    """What lay about before the first engine of this file began."""
    return leftover_files()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, files: set[str]) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("dense")
    dense().save_pretrained(folder)
    with VllmEngine(folder, config(tensor_parallel=2)) as engine:
        yield engine


def update(engine: VllmEngine, model: PreTrainedModel) -> None:
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(model)))


def test_log_probs_are_those_of_the_module_before_and_after_an_update(engine: VllmEngine) -> None:
    assert len(engine.info["workers"]) == 2
    update(engine, dense())
    old = sample(engine, PROMPTS)
    assert_agrees(dense(), PROMPTS, old)
    new = dense(seed=1)
    update(engine, new)
    done = sample(engine, PROMPTS)
    assert_agrees(new, PROMPTS, done)
    assert distances(new, PROMPTS, old).mean() > 5 * MEAN
    assert set(done[0].policy_versions) == {engine.version}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_workers_keep_the_old_weights_where_one_does_not_take_the_new(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    update(engine, dense())
    version = engine.version
    usual = engine._load_message
    own = f"/proc/self/task/{engine.info['workers'][1 - rank]}/root"  # the other's alone

    def seen_by_one(fall_back: bool) -> dict[str, Any]:
        message = usual(fall_back)
        path = message["path"].replace("/proc/self/", f"{own}/proc/{engine.pid}/")
        return message | {"path": path} if fall_back else message

    monkeypatch.setattr(engine, "_load_message", seen_by_one)
    with pytest.raises(RuntimeError, match=f"^worker {rank} of 2: RuntimeError: unable to open file"):
        update(engine, dense(seed=1))
    assert engine.version == version
    done = sample(engine, PROMPTS)
    assert_agrees(dense(), PROMPTS, done)
    assert set(done[0].policy_versions) == {version}
    monkeypatch.undo()
    new = dense(seed=2)
    update(engine, new)
    assert_agrees(new, PROMPTS, sample(engine, PROMPTS))


def test_a_cancelled_request_ends_in_all_workers(engine: VllmEngine) -> None:
    update(engine, dense())

    async def ask() -> Completion:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, request_id="it", on_tokens=lambda *_: begun.set()))
        await begun.wait()
        assert await engine.cancel("it")
        done = await task
        await engine.pause()
        await engine.resume()
        return done

    done = asyncio.run(ask())
    assert done.stop_reason == "abort"
    assert 0 < len(done.ids) < 1000
    assert_agrees(dense(), PROMPTS[:1], [done])


async def killed(engine: VllmEngine, process: int, problem: str) -> None:
    """Kill a process of the engine while it is at work."""
    begun = asyncio.Event()
    task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, on_tokens=lambda *_: begun.set()))
    await begun.wait()
    session = os.getsid(engine.pid)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=problem):
        await task
    with pytest.raises(RuntimeError, match=problem):
        await engine.generate(PROMPTS[0], ANSWER)
    assert_ends(session)
    assert not engine.alive


def test_a_closed_engine_has_no_worker_left(tmp_path: Path) -> None:
    """Whoever opens the next one finds their devices free."""
    dense().save_pretrained(tmp_path)
    with VllmEngine(tmp_path, config(tensor_parallel=2)) as engine:
        session, workers = os.getsid(engine.pid), {str(pid) for pid in engine.info["workers"]}
        assert workers <= set(alive_processes(session))
    assert not workers & set(alive_processes(session))


def test_a_killed_worker_ends_the_engine_and_leaves_nothing(engine: VllmEngine, files: set[str]) -> None:
    asyncio.run(killed(engine, engine.info["workers"][1], "worker 1 of 2 is gone"))
    engine.close()
    assert {path for path in abandoned(files) if "vllm_dist" in path or "/psm_" in path} == set()


@pytest.mark.parametrize("by_experts", [False, True])
def test_mixtures_have_the_modules_log_probs_before_and_after_an_update(
    tmp_path: Path, by_experts: bool, files: set[str]
) -> None:
    old, new = served_mixture(), served_mixture(seed=3)
    for model, name in ((old, "old"), (new, "new")):
        model.save_pretrained(tmp_path / name)
    with VllmEngine(tmp_path / "old", config(tensor_parallel=2, expert_parallel=by_experts)) as engine:
        before = sample(engine, PROMPTS)
        assert_agrees(old, PROMPTS, before)
        asyncio.run(engine.update_weights(1, checkpoint_pieces(tmp_path / "new")))
        done = sample(engine, PROMPTS)
        assert_agrees(new, PROMPTS, done)
        assert distances(new, PROMPTS, before).mean() > 5 * MEAN
        asyncio.run(killed(engine, engine.pid, "ended with code -9"))  # the server: its workers go with it


def test_a_model_that_cannot_be_shared_is_refused_by_name(tmp_path: Path) -> None:
    served().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="linear_num_key_heads 1 can't be shared by 2 workers"):
        VllmEngine(tmp_path, config(tensor_parallel=2))
