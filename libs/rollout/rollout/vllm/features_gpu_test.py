"""On a CUDA device: requests that are cut off, experts that are told, images that are seen, also by new weights."""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, PauseMode, Sampling
from rollout.experts import ROUTED_EXPERTS
from rollout.testing.model import SERVED, tiny_mixture
from rollout.testing.vision_model import Prompt, served_vision_model, shown, vision_distances
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, REASON, SIZES
from rollout.vllm.testing.served import PROMPTS, VERSIONS, changed, config, distances, forced, pieces, sample, served
from rollout.vllm.weights.shared_weights import checkpoint_pieces

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ, reason=REASON),
]
LONG = Sampling(max_new_tokens=1000, seed=1)
LAYERS, CHOSEN = 4, 2
SEEN = [shown(i, *grids) for i, grids in enumerate([[(1, 4, 6)], [(1, 2, 2), (1, 6, 2), (1, 4, 4)], [(1, 8, 8)]])]
TEXT: Prompt = ([5, 60, 70, 80, 90], {})
AXES = {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
SEEING_SIZES = SIZES | {"rope_parameters": SIZES["rope_parameters"] | AXES}
DEVICE = "cuda"  # of the modules too: where kernels of GPUs are installed, transformers calls them on any device
ON_DEVICE: dict[str, Any] = {"memory_share": 0.2, "arguments": ARGUMENTS}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """Of the dense model."""
    folder = tmp_path_factory.mktemp("dense")
    served(**SIZES).save_pretrained(folder)
    with VllmEngine(folder, config(**ON_DEVICE)) as engine:
        yield engine


def mixture(seed: int = 0) -> PreTrainedModel:
    """Experts that matter, in sizes for a GPU's kernels."""
    sizes = {**SERVED, **SIZES, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    model = tiny_mixture(300, layers=LAYERS, seed=seed, **sizes).to(DEVICE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-2)
            if ".experts." in name:
                parameter.mul_(0.2)
    return model


@torch.no_grad()
def share(model: PreTrainedModel, completions: Sequence[Completion]) -> float:
    """Of the tokens' choices, last tokens apart, that are the module's in float32."""
    same = []
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        row = torch.tensor([[*prompt, *completion.ids]], device=DEVICE)
        logits = model(input_ids=row, use_cache=False, output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(CHOSEN).indices.sort(-1).values for layer in logits], dim=1).cpu()
        table = completion.extras[ROUTED_EXPERTS].tensor()
        assert table.shape == (row.shape[1], LAYERS, CHOSEN)
        assert bool((table[:-1] >= 0).all())
        same.append((table[:-1].long().sort(-1).values == chosen[:-1]).all(-1).flatten().float())
    return torch.cat(same).mean().item()


def test_a_cancelled_request_answers_with_what_it_has(engine: VllmEngine) -> None:
    async def ask() -> Completion:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, request_id="it", on_tokens=lambda *_: begun.set()))
        await begun.wait()
        assert await engine.cancel("it")
        return await task

    done = asyncio.run(ask())
    assert done.stop_reason == "abort"
    assert 0 < len(done.ids) < 1000
    assert distances(served(**SIZES).to(DEVICE), PROMPTS[:1], [done]).mean() < CLOSE


def test_a_deadline_ends_a_request(engine: VllmEngine) -> None:
    async def ask() -> Completion:
        return await engine.generate(PROMPTS[0], LONG, deadline=time.monotonic() + 0.3)

    done = asyncio.run(ask())
    assert done.stop_reason == "deadline"
    assert len(done.ids) < 1000


@pytest.mark.parametrize("mode", ["abort", "finish"])
def test_pause_ends_or_finishes_what_runs(engine: VllmEngine, mode: PauseMode) -> None:
    async def ask() -> Completion:
        begun = asyncio.Event()
        how = Sampling(max_new_tokens=300, seed=2)
        running = asyncio.create_task(engine.generate(PROMPTS[0], how, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        await engine.pause(mode)
        assert engine.load().running == 0
        await engine.resume()
        return await running

    assert asyncio.run(ask()).stop_reason == {"abort": "abort", "finish": "length"}[mode]


def test_tokens_are_of_the_version_that_they_name_while_steps_overlap(tmp_path: Path) -> None:
    """vLLM prepares a step while the one before runs; weights are replaced under way, twice."""
    models = [served(**SIZES).to(DEVICE), *(changed(served(**SIZES).to(DEVICE), seed) for seed in (2, 5))]
    models[0].save_pretrained(tmp_path)
    prompts, counts = PROMPTS[:8], [0] * 8

    async def ask(engine: VllmEngine) -> list[Completion]:
        def count(number: int) -> Any:
            def note(*_: Any) -> None:
                counts[number] += 1

            return note

        asked = [engine.generate(p, replace(LONG, seed=None), on_tokens=count(i)) for i, p in enumerate(prompts)]
        running = asyncio.gather(*asked)
        for version, model in enumerate(models[1:], 1):
            while min(counts) < 100 * version:
                await asyncio.sleep(0.001)
            await engine.update_weights(version, pieces(model))
        return await running

    overlapping = ON_DEVICE | {"arguments": ARGUMENTS | {"async_scheduling": True}}
    swapping = replace(config(prefix_cache=True, **overlapping), on_commit="recompute")
    with VllmEngine(tmp_path, swapping) as engine:
        assert engine.info["overlaps"]
        answers = asyncio.run(ask(engine))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert set(answer.policy_versions) == {0, 1, 2}
        rows = torch.stack([forced(model, prompt, answer.ids) for model in models])
        versions = torch.tensor(answer.policy_versions)
        near = (torch.tensor(answer.log_probs) - rows.gather(0, versions[None])[0]).abs()
        other = (torch.tensor(answer.log_probs) - rows.gather(0, ((versions + 1) % 3)[None])[0]).abs()
        edges = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
        print("versions", near.mean(), near.max(), other.mean(), [near[i - 2 : i + 2].tolist() for i in edges])
        assert near.mean() < CLOSE
        assert other.mean() > FAR
        assert all(near[i - 2 : i + 2].mean() < 4 * CLOSE for i in edges), "at the swaps too"


def test_the_experts_told_are_those_of_the_module_before_and_after_an_update(tmp_path: Path) -> None:
    old, new = mixture(), mixture(seed=3)
    for model, name in ((old, "old"), (new, "new")):
        model.save_pretrained(tmp_path / name)
    with VllmEngine(tmp_path / "old", config(routed_experts=True, **ON_DEVICE)) as engine:
        before = sample(engine, PROMPTS)
        asyncio.run(engine.update_weights(next(VERSIONS), checkpoint_pieces(tmp_path / "new")))
        after = sample(engine, PROMPTS)
    for answers, model, other in ((before, old, new), (after, new, old)):
        print("distance", distances(model, PROMPTS, answers).mean(), distances(other, PROMPTS, answers).mean())
        print("share", share(model, answers), share(other, answers))
        assert distances(model, PROMPTS, answers).mean() < CLOSE
        assert distances(other, PROMPTS, answers).mean() > FAR
        assert share(model, answers) > 0.9
        assert share(other, answers) < 0.8


def test_images_are_seen_before_and_after_an_update(tmp_path: Path) -> None:
    old = served_vision_model(**SEEING_SIZES).to(DEVICE)
    old.save_pretrained(tmp_path)
    prompts = [*SEEN, TEXT]
    negative = [(ids, {**media, "pixel_values": -media["pixel_values"]}) for ids, media in SEEN]

    async def ask(engine: VllmEngine) -> list[Completion]:
        how = Sampling(max_new_tokens=8)
        asked = [engine.generate(ids, replace(how, seed=i), media or None) for i, (ids, media) in enumerate(prompts)]
        return await asyncio.gather(*asked)

    with VllmEngine(tmp_path, config(**ON_DEVICE)) as engine:
        before = asyncio.run(ask(engine))
        new = changed(served_vision_model(**SEEING_SIZES).to(DEVICE))
        asyncio.run(engine.update_weights(next(VERSIONS), pieces(new)))
        after = asyncio.run(ask(engine))
    for answers, model in ((before, old), (after, new)):
        near, far = (vision_distances(model, rows, answers[: len(rows)]).mean() for rows in (prompts, negative))
        print("images", near, far)
        assert near < CLOSE
        assert far > 2 * CLOSE
    assert vision_distances(old, prompts, after).mean() > FAR
