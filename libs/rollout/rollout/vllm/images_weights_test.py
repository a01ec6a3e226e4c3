"""New weights of a model that sees: its tower and its text are the new ones, and nothing that was seen is stale."""

import asyncio
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling
from rollout.testing.vision_model import Prompt, forced_by_types, served_vision_model, shown, vision_distances
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import ANSWER, MEAN, MOST, VERSIONS, config, pieces

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
PROMPTS = [shown(i, *grids) for i, grids in enumerate([[(1, 4, 6)], [(1, 2, 2), (1, 6, 2)], [(1, 8, 8)], [(1, 6, 6)]])]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    served_vision_model().save_pretrained(folder)
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


def ask(
    engine: VllmEngine, prompts: Sequence[Prompt] = PROMPTS, seeded: bool = True, most: int = ANSWER.max_new_tokens
) -> list[Completion]:
    async def all_of_them() -> list[Completion]:
        return await asyncio.gather(
            *[
                engine.generate(ids, replace(ANSWER, max_new_tokens=most, seed=i if seeded else None), media or None)
                for i, (ids, media) in enumerate(prompts)
            ]
        )

    return asyncio.run(all_of_them())


def update(engine: VllmEngine, model: PreTrainedModel) -> None:
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(model)))


def assert_agrees(model: PreTrainedModel, prompts: Sequence[Prompt], done: Sequence[Completion]) -> None:
    distance = vision_distances(model, prompts, done)
    assert distance.mean() < MEAN
    assert distance.max() < MOST


def moved(name: str) -> PreTrainedModel:
    """The model with one parameter changed, so much that its images say something else."""
    model = served_vision_model()
    with torch.no_grad():
        parameter = model.get_parameter(name)
        size = 2.0 if parameter.ndim == 1 else max(parameter.std().item(), 0.3)
        parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)) * size
    return model


TOWER = [
    name for name, _ in served_vision_model().named_parameters() if ".visual." in name and ".blocks.1." not in name
]
TEXT = [
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
    "model.language_model.layers.1.self_attn.q_proj.weight",
    "model.language_model.layers.1.mlp.down_proj.weight",
    "model.language_model.norm.weight",
]


def test_every_parameter_of_the_tower_arrives_and_those_of_the_text(engine: VllmEngine) -> None:
    """Each changed alone, so that none hides behind the rest."""
    old = ask(engine)
    for name in TOWER + TEXT:
        model = moved(name)
        stale = vision_distances(model, PROMPTS, old).mean()
        assert stale > 1.5 * MEAN, f"{name} makes no difference"
        update(engine, model)
        done = ask(engine)
        assert vision_distances(model, PROMPTS, done).mean() < stale / 2, name
        assert {version for one in done for version in one.policy_versions} == {engine.version}
    update(engine, served_vision_model())
    assert_agrees(served_vision_model(), PROMPTS, ask(engine))


BEFORE = 958


def late(number: int) -> Prompt:
    """1,029 tokens, of which 1,024 are kept: an image among the last of them."""
    ids, media = shown(7, (1, 14, 16))
    tokens = [*[60 + i % 200 for i in range(BEFORE)], *ids, *[70 + i for i in range(7)], 80 + number]
    return tokens, {**media, "mm_token_type_ids": [*[0] * BEFORE, *media["mm_token_type_ids"]]}


def short(engine: VllmEngine, prompts: Sequence[Prompt]) -> list[Completion]:
    """What is sampled next: the image weighs less with every token after it."""
    return ask(engine, [one for one in prompts for _ in range(8)], seeded=False, most=1)


def assert_nearer(
    model: PreTrainedModel, prompts: Sequence[Prompt], wrong: Sequence[Prompt], done: Sequence[Completion]
) -> None:
    """To what the model says of these prompts than of the wrong ones."""
    right, other = (vision_distances(model, [one for one in p for _ in range(8)], done) for p in (prompts, wrong))
    assert right.mean() < min(MEAN, other.mean().item() / 2)


def test_kept_prompts_with_images_are_not_stale_and_not_other_images(keeping: VllmEngine) -> None:
    """From what was kept; with other pixels; after an update of the tower alone, and of the text alone."""
    model, prompts = served_vision_model(), [late(number) for number in range(3)]
    other = [(ids, {**media, "pixel_values": -media["pixel_values"]}) for ids, media in prompts]
    for _ in range(2):
        assert_nearer(model, prompts, other, short(keeping, prompts))
        assert_nearer(model, other, prompts, short(keeping, other))
    for name in ("model.visual.merger.linear_fc2.weight", "model.language_model.layers.0.mlp.down_proj.weight"):
        new = moved(name)
        every = [one for one in prompts for _ in range(8)]
        stale = vision_distances(new, every, short(keeping, prompts)).mean()
        update(keeping, new)
        assert vision_distances(new, every, short(keeping, prompts)).mean() < stale / 2
    update(keeping, served_vision_model())


def test_what_runs_sees_its_images_again_by_the_new_tower(keeping: VllmEngine) -> None:
    """Every token's log-prob is that of the version it names."""
    old, new, coming = served_vision_model(), moved("model.visual.merger.linear_fc2.weight"), next(VERSIONS)
    version = keeping.version
    ids, media = PROMPTS[2]

    async def swap() -> Completion:
        begun = asyncio.Event()
        long = Sampling(max_new_tokens=60)
        task = asyncio.create_task(keeping.generate(ids, long, media, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        await keeping.update_weights(coming, pieces(new))
        return await task

    done = asyncio.run(swap())
    versions = torch.tensor(done.policy_versions)
    assert set(done.policy_versions) == {version, coming}
    told = torch.tensor(done.log_probs)
    by_old, by_new = (forced_by_types(model, PROMPTS[2], done.ids) for model in (old, new))
    expected = torch.where(versions == version, by_old, by_new)
    assert (told - expected).abs().mean() < MEAN
    late = versions == coming
    assert (told - by_new)[late].abs().mean() < (told - by_old)[late].abs().mean() / 2


def test_an_image_that_was_seen_before_is_seen_anew_after_an_update(engine: VllmEngine) -> None:
    """vLLM keeps what its tower said of an image, by the image's name: not beyond an update."""
    new = moved("model.visual.merger.linear_fc2.weight")
    assert_agrees(served_vision_model(), PROMPTS, ask(engine))
    update(engine, new)
    assert_agrees(new, PROMPTS, ask(engine))
    update(engine, served_vision_model())
    assert_agrees(served_vision_model(), PROMPTS, ask(engine))
