"""Images through vLLM itself, in its own process and environment: what it samples is what the stock module says."""

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.engine import Completion, Sampling
from rollout.testing.vision_model import IMAGE, Prompt, forced_by_types, served_vision_model, vision_distances
from rollout.vllm import engine as engine_module
from rollout.vllm.client.images import Shown, shown_in
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import ANSWER, MEAN, config, served
from rollout.vllm.testing.served_images import GREEDY, PROMPTS, SEEN, ask, assert_images_agree, other_images

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the settings of a preprocessor: a trap, as vLLM would normalise patches by them that are normalised."""
    folder = tmp_path_factory.mktemp("model")
    served_vision_model().save_pretrained(folder)
    settings = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 2, "temporal_patch_size": 2}
    settings |= {"merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[VllmEngine]:
    with VllmEngine(directory, config()) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [ANSWER, GREEDY], ids=["sampled", "greedy"])
def test_log_probs_are_those_of_the_stock_module(engine: VllmEngine, sampling: Sampling) -> None:
    """One image, several, one in a later turn; a prompt of text in the same batch; each also alone."""
    done = ask(engine, sampling=sampling)
    assert_images_agree(served_vision_model(), PROMPTS, done)
    assert vision_distances(served_vision_model(), other_images(SEEN), done[: len(SEEN)]).mean() > 2 * MEAN
    assert_images_agree(served_vision_model(), PROMPTS, [ask(engine, [prompt], sampling)[0] for prompt in PROMPTS])


def test_each_copy_of_a_model_is_shown_its_own_requests_images(directory: Path) -> None:
    """Dealt out: images that several requests show go to each copy that is asked of one."""

    async def ask_all(engine: VllmEngine) -> tuple[list[Prompt], list[Completion]]:
        prompts = PROMPTS * 2
        return prompts, await asyncio.gather(
            *[engine.generate(ids, ANSWER, media or None) for ids, media in prompts],
        )

    with VllmEngine(directory, config(data_parallel=2)) as engine:
        assert_images_agree(served_vision_model(), *asyncio.run(ask_all(engine)))


def test_an_image_token_of_text_stays_text(engine: VllmEngine) -> None:
    """As a model samples one, and goes on from it in the next turn."""
    ids, media = SEEN[0]
    prompt = ([*ids, IMAGE, 77, IMAGE, IMAGE, 78], media)
    (done,) = ask(engine, [prompt])
    assert (torch.tensor(done.log_probs) - forced_by_types(served_vision_model(), prompt, done.ids)).abs().mean() < MEAN
    whole = {**media, "mm_token_type_ids": [*media["mm_token_type_ids"], 0, 0, 0, 0, 0]}
    assert ask(engine, [(prompt[0], whole)])[0] == done


def test_equal_prompts_with_equal_images_answer_alike_and_other_images_do_not(engine: VllmEngine) -> None:
    first, second = SEEN[1], other_images(SEEN)[1]
    told = ask(engine, [first, second, first], GREEDY)
    assert told[0].log_probs == pytest.approx(told[2].log_probs, abs=1e-3)
    assert_images_agree(served_vision_model(), [first, second, first], told)


IDS, MEDIA = SEEN[0]


@pytest.mark.parametrize(
    ("ids", "media", "problem"),
    [
        (IDS[:-8], {**MEDIA, "mm_token_type_ids": MEDIA["mm_token_type_ids"][:-8]}, "a run of 1 image tokens where"),
        ([*IDS[:5], 77, *IDS[6:]], MEDIA, "token 5 of the prompt is 77, where its image has tokens 44"),
        (IDS, {**MEDIA, "image_grid_thw": torch.tensor([[1, 6, 4], [1, 2, 2]])}, "not what the grids"),
        (IDS, {**MEDIA, "pixel_values": torch.zeros(24, 12)}, "cut into patches for another model"),
        (IDS, {"mm_token_type_ids": [], "pixel_values_videos": torch.zeros(0, 24)}, "they come together"),
    ],
)
def test_images_that_do_not_fit_are_refused(
    engine: VllmEngine, ids: list[int], media: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        ask(engine, [(ids, media)])


def test_a_video_is_refused_by_name(engine: VllmEngine) -> None:
    media = {
        "mm_token_type_ids": [0, 2, 0, 2, 0],
        "pixel_values_videos": torch.zeros(8, 24),
        "video_grid_thw": torch.tensor([[2, 2, 2]]),
    }
    with pytest.raises(ValueError, match=r"pixel_values_videos can't be sampled from: no test has run videos"):
        ask(engine, [([60, 45, 61, 45, 62], media)])


def test_positions_that_are_not_the_trainers_are_refused_by_vllms_process(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a vLLM that counts them in another way would have them."""

    def turned(*given: Any) -> Shown:
        return replace(shown_in(*given), positions="00")

    monkeypatch.setattr(engine_module, "shown_in", turned)
    with pytest.raises(ValueError, match=r"grids \[\[1, 4, 6\]\] other positions than the trainer"):
        ask(engine, SEEN[:1])
    monkeypatch.undo()
    assert_images_agree(served_vision_model(), SEEN[:1], ask(engine, SEEN[:1]))


def test_a_model_of_text_is_shown_nothing(tmp_path: Path) -> None:
    served().save_pretrained(tmp_path)
    with VllmEngine(tmp_path, config()) as blind, pytest.raises(ValueError, match="vLLM's model sees nothing here"):
        ask(blind, SEEN[:1])
