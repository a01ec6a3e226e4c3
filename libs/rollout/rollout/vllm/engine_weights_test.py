"""New weights in vLLM's process: every parameter is the new one, or all are the old ones; nothing kept is stale.

One process serves most tests, a second one keeps prompts.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.sync.adapter import Adapter
from rollout.sync.manifest import Manifest, manifest_of
from rollout.sync.pieces import Piece, buckets
from rollout.sync.rate import copy_rate
from rollout.sync.transfer import transfer_weights
from rollout.testing.pieces import pieces_of
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
    forced,
    pieces,
    sample,
    served,
)

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VllmEngine]:
    with VllmEngine(directory, config()) as engine:
        yield engine


@pytest.fixture(scope="module")
def keeping(directory: Path) -> Iterator[VllmEngine]:
    """An engine that keeps prompts, and has running requests read theirs again after an update."""
    with VllmEngine(directory, replace(config(prefix_cache=True), on_commit="recompute")) as engine:
        yield engine


@pytest.fixture
def model() -> PreTrainedModel:
    """The module of the directory; a test may change it."""
    return served()


def update(engine: VllmEngine, model: PreTrainedModel) -> None:
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(model)))


@pytest.fixture
def restored(engine: VllmEngine) -> Iterator[VllmEngine]:
    """The engine, with the weights of the directory again afterwards."""
    yield engine
    update(engine, served())


def test_every_parameter_arrives(restored: VllmEngine) -> None:
    """Each changed alone, so that none hides behind the rest; the tied head is the embedding's other half."""
    old = sample(restored, PROMPTS)
    for name in [name for name, _ in served().named_parameters() if ".layers.2." not in name and ".3." not in name]:
        model = served()
        with torch.no_grad():
            parameter = model.get_parameter(name)
            if parameter.numel() == 1:
                parameter += 3  # a delta net's decay, of its one head
            else:  # norms act little
                size = 1.0 if parameter.ndim == 1 else max(0.5 * parameter.std().item(), 0.2)
                parameter += torch.randn_like(parameter) * size
        stale = distances(model, PROMPTS, old).mean()
        assert stale > 2 * MEAN, f"{name} makes no difference"
        begun = time.perf_counter()
        update(restored, model)
        took = time.perf_counter() - begun
        done = sample(restored, PROMPTS)
        assert distances(model, PROMPTS, done).mean() < stale / 2, name
        assert set(done[0].policy_versions) == {restored.version}
    assert restored.transfer is not None
    assert restored.transfer.nbytes >= sum(p.numel() * p.element_size() for p in model.parameters())
    seconds = restored.transfer.staged_s + restored.transfer.paused_s
    rate = restored.transfer.nbytes / seconds
    assert 0 < restored.transfer.paused_s < seconds <= took
    assert restored.transfer.link_share == pytest.approx(
        rate / copy_rate(restored.transfer.nbytes, restored._weights.device)
    )


def test_an_adapter_alone_arrives(restored: VllmEngine) -> None:
    """Added to the base, the second one in place of the first; on layers that vLLM joins."""
    layers = [n.removesuffix(".weight") for n, p in served().named_parameters() if "_proj.weight" in n and p.ndim == 2]
    adapter = Adapter(rank=2, scale=0.5, layers=tuple(layers))
    for seed in (1, 2):
        rng, pairs, merged = torch.Generator().manual_seed(seed), {}, served()
        for layer in layers:
            weight = merged.get_submodule(layer).weight
            pairs[f"{layer}.lora_A"] = torch.randn(2, weight.shape[1], generator=rng)
            pairs[f"{layer}.lora_B"] = torch.randn(weight.shape[0], 2, generator=rng) * 2 * weight.std().item()
            with torch.no_grad():
                weight += 0.5 * pairs[f"{layer}.lora_B"] @ pairs[f"{layer}.lora_A"]
        old, version = sample(restored, PROMPTS), next(VERSIONS)
        stale = distances(merged, PROMPTS, old).mean()
        stream = buckets(pieces_of(pairs.items()), 1 << 12)
        asyncio.run(transfer_weights([restored], Manifest(version, adapter=adapter), stream))
        done = sample(restored, PROMPTS)
        assert stale > 2 * MEAN
        assert distances(merged, PROMPTS, done).mean() < stale / 2
        assert set(done[0].policy_versions) == {version}


def test_an_abort_after_the_commit_brings_the_old_weights_back(restored: VllmEngine, model: PreTrainedModel) -> None:
    old = served()
    new, version, coming = changed(model), restored.version, next(VERSIONS)

    async def take_and_abort() -> None:
        await restored.prepare(manifest_of(coming, pieces(new)))
        missing = [await restored.receive(bucket) for bucket in buckets(pieces(new), 1 << 16)]
        assert missing[-1] == 0
        await restored.commit(coming)
        assert restored.version == coming
        await restored.abort()

    asyncio.run(take_and_abort())
    assert restored.version == version
    done = sample(restored, PROMPTS)
    assert_agrees(old, PROMPTS, done)
    assert distances(new, PROMPTS, done).mean() > 5 * MEAN
    assert set(done[0].policy_versions) == {version}


def test_what_is_staged_changes_nothing_and_what_is_wrong_is_refused(
    restored: VllmEngine, model: PreTrainedModel
) -> None:
    version, coming = restored.version, next(VERSIONS)

    async def stage(found: Iterable[Piece]) -> None:
        await restored.prepare(Manifest(coming))
        for bucket in buckets(found, 1 << 20):
            await restored.receive(bucket)

    new = changed(model)
    asyncio.run(stage(pieces(new)[:-1]))
    assert_agrees(served(), PROMPTS, sample(restored, PROMPTS))
    with pytest.raises(ValueError, match="never arrived"):
        asyncio.run(restored.commit(coming))
    with torch.no_grad():
        new.model.norm.weight[3] = torch.nan
    with pytest.raises(ValueError, match=r"model.norm.weight: element 3 is nan"):
        update(restored, new)
    assert restored.version == version
    assert_agrees(served(), PROMPTS, sample(restored, PROMPTS))


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"])
def test_a_file_that_is_damaged_is_refused_by_the_tensors_name(
    restored: VllmEngine, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """One bit, on the way between the two processes; the old weights answer."""
    version, usual = restored.version, restored._load_message

    def damage(fall_back: bool) -> dict[str, Any]:
        message = usual(fall_back)
        if fall_back:
            restored._weights.regions[restored._weights.in_use].tensors[name].view(torch.uint8)[3, 1] ^= 1
        return message

    monkeypatch.setattr(restored, "_load_message", damage)
    with pytest.raises(RuntimeError, match=f"{name} is not what was staged$"):
        update(restored, changed(model))
    assert restored.version == version
    assert_agrees(served(), PROMPTS, sample(restored, PROMPTS))


def test_a_tied_head_may_arrive_under_its_own_name(restored: VllmEngine, model: PreTrainedModel) -> None:
    new = changed(model)
    found = [
        piece._replace(name="lm_head.weight") if piece.name.endswith("embed_tokens.weight") else piece
        for piece in pieces(new)
    ]
    asyncio.run(restored.update_weights(next(VERSIONS), found))
    assert_agrees(new, PROMPTS, sample(restored, PROMPTS))


def test_weights_are_swapped_under_way(restored: VllmEngine, model: PreTrainedModel) -> None:
    new, version, coming = changed(model), restored.version, next(VERSIONS)

    async def swap() -> Completion:
        begun = asyncio.Event()
        task = asyncio.create_task(
            restored.generate(PROMPTS[0], Sampling(max_new_tokens=300), on_tokens=lambda *_: begun.set())
        )
        await begun.wait()
        await restored.update_weights(coming, pieces(new))
        return await task

    done = asyncio.run(swap())
    assert done.stop_reason == "length"
    assert set(done.policy_versions) == {version, coming}
    assert list(done.policy_versions) == sorted(done.policy_versions)


# -- a second engine, which keeps prompts ------------------------------------------------------------------------------


def sample_unseeded(engine: VllmEngine, prompts: Sequence[Sequence[int]]) -> list[Completion]:
    async def ask() -> list[Completion]:
        return await asyncio.gather(*[engine.generate(p, ANSWER) for p in prompts])

    return asyncio.run(ask())


def test_the_prefix_cache_is_not_stale_after_an_update(keeping: VllmEngine, model: PreTrainedModel) -> None:
    prompts = [[5 + i % 200 for i in range(1200)] + [11 + i] for i in range(3)]
    assert_agrees(model, prompts, sample_unseeded(keeping, prompts))
    assert_agrees(model, prompts, sample_unseeded(keeping, prompts))  # from what was kept
    new = changed(model)
    update(keeping, new)
    assert_agrees(new, prompts, sample_unseeded(keeping, prompts))


def test_a_seed_is_refused_where_prompts_are_read_in_parts(keeping: VllmEngine) -> None:
    with pytest.raises(ValueError, match=r"a seed can't be had .*prefix_cache and split_prompts off"):
        asyncio.run(keeping.generate(PROMPTS[0], replace(ANSWER, seed=1)))


def test_running_requests_read_their_tokens_again_where_asked(keeping: VllmEngine, model: PreTrainedModel) -> None:
    """Every token's log-prob is that of the version it names, the tokens before it being what they are."""
    old = served()
    update(keeping, old)
    new, version, coming = changed(model, seed=2), keeping.version, next(VERSIONS)

    async def swap() -> Completion:
        begun = asyncio.Event()
        task = asyncio.create_task(
            keeping.generate(PROMPTS[0], Sampling(max_new_tokens=200), on_tokens=lambda *_: begun.set())
        )
        await begun.wait()
        await keeping.update_weights(coming, pieces(new))
        return await task

    done = asyncio.run(swap())
    versions = torch.tensor(done.policy_versions)
    assert set(done.policy_versions) == {version, coming}
    expected = torch.where(versions == version, forced(old, PROMPTS[0], done.ids), forced(new, PROMPTS[0], done.ids))
    assert (torch.tensor(done.log_probs) - expected).abs().mean() < MEAN


def test_a_process_that_dies_is_told_with_its_last_words(keeping: VllmEngine) -> None:
    """The last of this engine's tests."""

    async def ask() -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(
            keeping.generate(PROMPTS[0], Sampling(max_new_tokens=1000), on_tokens=lambda *_: begun.set())
        )
        await begun.wait()
        assert keeping.alive
        os.kill(keeping.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="ended with code -9; its last words"):
            await task
        assert not keeping.alive
        with pytest.raises(RuntimeError, match="ended with code -9"):
            await keeping.generate(PROMPTS[0], ANSWER)
        with pytest.raises(RuntimeError, match="ended with code -9"):
            await keeping.update_weights(99, pieces(served()))

    asyncio.run(ask())


@pytest.mark.parametrize("kept", [True, False])
def test_weights_handed_over_asleep_answer_once_awake_and_refused_ones_do_not(
    engine: VllmEngine, model: PreTrainedModel, kept: bool
) -> None:
    """Asleep nothing is read: the new weights wait where they are staged, and are dropped where a rank refused them."""
    old, new = changed(model), changed(deepcopy(model), seed=2)
    before, number = next(VERSIONS), next(VERSIONS)
    asyncio.run(engine.update_weights(before, pieces(old)))

    async def night() -> None:
        await engine._sleep()
        told = engine.transfer
        await engine.pause()
        await engine.prepare(Manifest(number))
        for bucket in buckets(pieces(new), 1 << 20):
            await engine.receive(bucket)
        await engine.commit(number)
        assert engine.transfer is told  # vLLM has read nothing yet
        if not kept:
            await engine.abort()
        await engine.resume()
        await engine.wake()
        assert (engine.transfer is not told) == kept

    asyncio.run(night())
    assert engine.version == (number if kept else before)
    answers = sample(engine, PROMPTS, ANSWER)
    assert {version for answer in answers for version in answer.policy_versions} == {engine.version}
    right, wrong = (new, old) if kept else (old, new)
    near, far = (distances(one, PROMPTS, answers).mean() for one in (right, wrong))
    assert near < MEAN < far


def test_asleep_requests_wait_and_awake_the_weights_in_use_answer(engine: VllmEngine, model: PreTrainedModel) -> None:
    """All but the memory, which vLLM keeps on a CPU (`engine_test`): what is asked waits."""
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(changed(model))))
    likeliest = Sampling(max_new_tokens=8, greedy=True)

    async def night() -> list[Completion]:
        await engine._sleep()  # `sleep` refuses it on a CPU
        await engine._sleep()
        waiting = asyncio.gather(*(engine.generate(prompt, likeliest) for prompt in PROMPTS))
        await engine.resume()
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await engine.wake()
        await engine.wake()
        return await waiting

    async def day() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt, likeliest) for prompt in PROMPTS))

    before, after = asyncio.run(day()), asyncio.run(night())
    firsts = [(one.log_probs[0] - two.log_probs[0]) for one, two in zip(before, after, strict=True)]
    assert sum(map(abs, firsts)) / len(firsts) < MEAN / 5
    assert all(set(done.policy_versions) == {engine.version} for done in after)
