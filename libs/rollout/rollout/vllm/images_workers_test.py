"""Images through a vLLM of two workers: each has a part of the tower too, and both show what the stock module sees."""

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from rollout.engine import Sampling
from rollout.testing.vision_model import served_vision_model, served_vision_moe, vision_distances
from rollout.vllm import engine as engine_module
from rollout.vllm.client.images import Shown, shown_in
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import ANSWER, MEAN, VERSIONS, config, pieces
from rollout.vllm.testing.served_images import GREEDY, PROMPTS, SEEN, ask, assert_images_agree, other_images
from rollout.vllm.weights.shared_weights import checkpoint_pieces

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def model_of(seed: int = 0) -> PreTrainedModel:
    return served_vision_model(seed, **HEADS)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("model")
    model_of().save_pretrained(folder)
    with VllmEngine(folder, config(tensor_parallel=2)) as engine:
        assert len(engine.info["workers"]) == 2
        yield engine


@pytest.mark.parametrize("sampling", [ANSWER, GREEDY], ids=["sampled", "greedy"])
def test_log_probs_are_those_of_the_stock_module(engine: VllmEngine, sampling: Sampling) -> None:
    """One image, several, one in a later turn; a prompt of text in the same batch; each also alone."""
    done = ask(engine, sampling=sampling)
    assert_images_agree(model_of(), PROMPTS, done)
    assert vision_distances(model_of(), other_images(SEEN), done[: len(SEEN)]).mean() > 2 * MEAN  # it can tell
    assert_images_agree(model_of(), PROMPTS, [ask(engine, [prompt], sampling)[0] for prompt in PROMPTS])


def test_positions_that_are_not_the_trainers_are_refused(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(*given: Any) -> Shown:
        return replace(shown_in(*given), positions="00")

    monkeypatch.setattr(engine_module, "shown_in", turned)
    with pytest.raises(ValueError, match=r"grids \[\[1, 4, 6\]\] other positions than the trainer"):
        ask(engine, SEEN[:1])


def test_both_workers_see_by_the_new_tower_after_an_update(engine: VllmEngine) -> None:
    """The same images, which vLLM had seen by the old one."""
    old, new = ask(engine), model_of(seed=1)
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(new)))
    done = ask(engine)
    assert_images_agree(new, PROMPTS, done)
    assert vision_distances(new, SEEN, old[: len(SEEN)]).mean() > 5 * MEAN
    tower = model_of(seed=1)
    tower.model.visual.load_state_dict(model_of().model.visual.state_dict())
    asyncio.run(engine.update_weights(next(VERSIONS), pieces(tower)))
    assert_images_agree(tower, PROMPTS, ask(engine))
    assert vision_distances(tower, SEEN, done[: len(SEEN)]).mean() > 2 * MEAN


@pytest.mark.parametrize(
    "spread",
    [
        {},
        {"tensor_parallel": 2},
        {"tensor_parallel": 2, "expert_parallel": True},
        {"data_parallel": 2, "expert_parallel": True, "experts_over_copies": True},
        {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": True, "experts_over_copies": True},
    ],
)
def test_mixtures_see_what_the_stock_module_sees(tmp_path: Path, spread: dict[str, Any]) -> None:
    """Before and after an update."""
    old, new = (served_vision_moe(seed, **HEADS, num_experts=8) for seed in (0, 3))
    for model, name in ((old, "old"), (new, "new")):
        model.save_pretrained(tmp_path / name)
    with VllmEngine(tmp_path / "old", config(**spread)) as engine:
        before = ask(engine)
        assert_images_agree(old, PROMPTS, before)
        assert vision_distances(old, other_images(SEEN), before[: len(SEEN)]).mean() > 2 * MEAN  # it can tell
        asyncio.run(engine.update_weights(1, checkpoint_pieces(tmp_path / "new")))
        assert_images_agree(new, PROMPTS, ask(engine))
        assert vision_distances(new, PROMPTS, before).mean() > 5 * MEAN
