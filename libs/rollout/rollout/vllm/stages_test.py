"""vLLM with a model in stages (pipeline parallelism) on a CPU: what comes out is the module's, of one version a step.

The last test of each engine ends it by a kill.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.testing.processes import assert_ends
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import (
    HEADS,
    MEAN,
    MOST,
    PROMPTS,
    VERSIONS,
    assert_agrees,
    config,
    distances,
    forced,
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
SECONDS = 1500.0
"""Until four processes have started, where other work takes the processors."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Two stages of one worker each; running requests read their tokens again after an update."""
    folder = tmp_path_factory.mktemp("dense")
    served(**HEADS).save_pretrained(folder)
    with VllmEngine(
        folder, replace(config(pipeline_parallel=2, start_seconds=SECONDS), on_commit="recompute")
    ) as engine:
        yield engine


def update(engine: VllmEngine, model: PreTrainedModel) -> None:
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(model)))


def test_log_probs_are_those_of_the_module_before_and_after_an_update(engine: VllmEngine) -> None:
    assert len(engine.info["workers"]) == 2
    assert engine.supports("pipeline_parallel")
    old, new = served(**HEADS), served(seed=1, **HEADS)
    update(engine, old)
    before = sample(engine, PROMPTS)
    assert_agrees(old, PROMPTS, before)
    update(engine, new)
    done = sample(engine, PROMPTS)
    assert_agrees(new, PROMPTS, done)
    assert distances(new, PROMPTS, before).mean() > 5 * MEAN
    assert set(done[0].policy_versions) == {engine.version}


def test_a_prompt_is_scored_as_by_the_module(engine: VllmEngine) -> None:
    model = served(**HEADS)
    update(engine, model)
    for prompt in PROMPTS[:4]:
        found = asyncio.run(engine.score(prompt))
        assert (found.log_probs[1:] - forced(model, prompt[:1], prompt[1:])).abs().max() < MOST


def test_each_token_of_requests_under_way_is_of_the_version_that_it_names(engine: VllmEngine) -> None:
    """Two batches are in the stages at once when the weights come; all read their tokens again with the new ones."""
    old, new = served(**HEADS), served(seed=2, **HEADS)
    update(engine, old)
    version, coming = engine.version, next(VERSIONS)

    async def swap() -> list[Completion]:
        begun = asyncio.Event()
        asked = [
            engine.generate(p, replace(LONG, max_new_tokens=200), on_tokens=lambda *_: begun.set()) for p in PROMPTS
        ]
        tasks = [asyncio.create_task(one) for one in asked]
        await begun.wait()
        await engine.update_weights(coming, pieces(new))
        return await asyncio.gather(*tasks)

    for prompt, done in zip(PROMPTS, asyncio.run(swap()), strict=True):
        versions = torch.tensor(done.policy_versions)
        assert set(done.policy_versions) == {version, coming}
        assert list(done.policy_versions) == sorted(done.policy_versions)
        before, after = (forced(model, prompt, done.ids) for model in (old, new))
        apart = (torch.tensor(done.log_probs) - torch.where(versions == version, before, after)).abs()
        assert apart.mean() < MEAN
        assert apart.max() < MOST


@pytest.mark.parametrize("rank", [0, 1])
def test_all_stages_keep_the_old_weights_where_one_does_not_take_the_new(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    model = served(**HEADS)
    update(engine, model)
    version = engine.version
    usual = engine._load_message
    own = f"/proc/self/task/{engine.info['workers'][1 - rank]}/root"  # the other's alone

    def seen_by_one(fall_back: bool) -> dict[str, Any]:
        message = usual(fall_back)
        path = message["path"].replace("/proc/self/", f"{own}/proc/{engine.pid}/")
        return message | {"path": path} if fall_back else message

    monkeypatch.setattr(engine, "_load_message", seen_by_one)
    with pytest.raises(RuntimeError, match=f"^worker {rank} of 2: RuntimeError: unable to open file"):
        update(engine, served(seed=1, **HEADS))
    assert engine.version == version
    assert_agrees(model, PROMPTS, sample(engine, PROMPTS))


def test_a_cancelled_request_ends_in_all_stages(engine: VllmEngine) -> None:
    model = served(**HEADS)
    update(engine, model)

    async def ask() -> list[Completion]:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, request_id="it", on_tokens=lambda *_: begun.set()))
        beside = asyncio.create_task(engine.generate(PROMPTS[1], replace(LONG, max_new_tokens=40)))
        await begun.wait()
        assert await engine.cancel("it")
        return [await task, await beside]

    done = asyncio.run(ask())
    assert [one.stop_reason for one in done] == ["abort", "length"]
    assert_agrees(model, PROMPTS[:2], done)


def test_a_killed_stage_ends_the_engine(engine: VllmEngine) -> None:
    async def killed() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        session = os.getsid(engine.pid)
        os.kill(engine.info["workers"][1], signal.SIGKILL)
        with pytest.raises(RuntimeError, match="worker 1 of 2 is gone"):
            await task
        assert_ends(session)

    asyncio.run(killed())
    assert not engine.alive


@pytest.mark.parametrize("by_experts", [False, True])
def test_stages_of_two_workers_have_a_mixtures_log_probs(tmp_path: Path, by_experts: bool) -> None:
    """Four workers: in each stage two share matrices and experts, or have whole experts."""
    old, new = served_mixture(), served_mixture(seed=3)
    for model, name in ((old, "old"), (new, "new")):
        model.save_pretrained(tmp_path / name)
    spread = config(pipeline_parallel=2, tensor_parallel=2, expert_parallel=by_experts, start_seconds=SECONDS)
    with VllmEngine(tmp_path / "old", spread) as engine:
        assert len(engine.info["workers"]) == 4
        before = sample(engine, PROMPTS)
        assert_agrees(old, PROMPTS, before)
        asyncio.run(engine.update_weights(1, checkpoint_pieces(tmp_path / "new")))
        assert_agrees(new, PROMPTS, sample(engine, PROMPTS))
        assert distances(new, PROMPTS, before).mean() > 5 * MEAN


def test_prompts_are_read_in_parts_and_kept(tmp_path: Path) -> None:
    """Two parts of a prompt are in the stages at once; new weights leave nothing of a kept prompt."""
    old, new = served(**HEADS), served(seed=1, **HEADS)
    old.save_pretrained(tmp_path)
    parted = config(pipeline_parallel=2, split_prompts=True, prefix_cache=True, drop_seeds=True, start_seconds=SECONDS)
    prompts = [[5 + i % 200 for i in range(1200)] + [11 + i] for i in range(3)]
    with VllmEngine(tmp_path, replace(parted, prefill_tokens=600)) as engine:
        for _ in range(2):
            assert_agrees(old, prompts, sample(engine, prompts))
        update(engine, new)
        assert_agrees(new, prompts, sample(engine, prompts))


def test_more_stages_than_layers_are_refused_by_name(tmp_path: Path) -> None:
    served(**HEADS).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="4 layers can't fill 5 stages"):
        VllmEngine(tmp_path, config(pipeline_parallel=5))
