"""Rows that show pictures: equal ones enter the model once, and each picture enters the tower once."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engines import EngineConfig, build_engine
from engines.execution.micro_batches import MicroBatch
from engines.inputs.equal_rows import inputs_of_distinct_rows
from engines.inputs.model_inputs import ModelInputs, PackedInputs
from engines.media.media_batch import with_positions
from engines.media.vision_inputs import VisionInputs
from engines.prove.float64 import KeepFloat64
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.token_scorer import TokenScorer
from engines.testing.images import media_sample
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.testing.vision import SETTINGS, Sample, samples, vision_model
from objectives import GRPO
from seqpack import pack_sequences
from seqpack.batches.batch import make_batch, view_batch
from seqpack.batches.mrope import sequence_positions

PATCHES, VIDEO = "pixel_values", "pixel_values_videos"


def shown(picture: int, answer: Sequence[int], place: int = 0) -> Sample:
    """A question about picture number `picture`, and an answer of these tokens."""
    sample = media_sample(SETTINGS, [3, 2 + len(answer)], [(1, 4, 4)], seed=0)
    sample["input_ids"][len(sample["input_ids"]) - len(answer) :] = torch.tensor(answer)
    drawn = torch.Generator().manual_seed(picture)
    sample[PATCHES] = torch.randn(sample[PATCHES].shape, generator=drawn)
    sample["advantages"] = torch.full((len(sample["input_ids"]),), 0.5 - place)
    return sample


GROUPS = [(0, [5, 6]), (0, [5, 6]), (1, [5, 6]), (0, [7]), (1, [5, 6]), (0, [5, 6]), (2, [7])]
"""Three pictures, of which seven rows are four distinct ones."""


def rows() -> list[Sample]:
    return [shown(picture, answer, place) for place, (picture, answer) in enumerate(GROUPS)]


def packed(drawn: list[Sample]) -> MicroBatch:
    one = pack_sequences(make_batch(drawn))
    return MicroBatch(one, tuple(range(len(drawn))), one.values["loss_mask"], (0,))


def both(drawn: list[Sample]) -> tuple[ModelInputs, ModelInputs]:
    """The inputs of distinct rows, and of all."""
    builder, one = PackedInputs(vision=SETTINGS), packed(drawn)
    return inputs_of_distinct_rows(one, builder.inputs), builder.inputs(one)


def test_by_hand() -> None:
    few, every = both(rows())
    assert few.context is not None
    assert few.vision is not None
    assert every.vision is not None
    assert len(few.context.cu_seqlens) - 1 == 4
    assert (len(few.vision.grid_thw), len(every.vision.grid_thw)) == (3, len(GROUPS))
    first = every.vision.patches.view(len(GROUPS), 16, -1)
    torch.testing.assert_close(few.vision.patches.view(3, 16, -1), first[[0, 2, 6]], rtol=0, atol=0)
    assert few.vision.features.view(-1, 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3], [8, 9, 10, 11]]
    assert few.tokens == every.tokens


def features_seen(vision: VisionInputs) -> list[list[float]]:
    """What stands at each slot, where a feature is the mean of its patches: the tower's own does not matter."""
    unit = SETTINGS.merge_size**2
    features = vision.patches.view(-1, unit, vision.patches.shape[1]).mean(1)
    taken: list[list[float]] = features[vision.features].tolist()
    return taken


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), min_size=1, max_size=5))
def test_each_token_takes_the_feature_of_its_own_picture(drawn: list[tuple[int, bool, bool]]) -> None:
    """Pictures of two sizes, videos and text, in any mixture."""
    made = []
    for seed, picture, video in drawn:
        images, videos = [(1, 2, 4), (1, 4, 2)][: 2 * picture], [(2, 2, 2)] * video
        made.append(media_sample(SETTINGS, [2] * (len(images) + 2 * len(videos) + 1), images, videos, seed=seed))
    vision = PackedInputs(vision=SETTINGS).inputs(packed(made)).vision
    assert vision is not None
    few = vision.distinct()
    assert few.slots.tolist() == vision.slots.tolist()
    assert features_seen(few) == features_seen(vision)
    pieces = few.patches.split(few.grid_thw.prod(-1).tolist())
    seen = {(*grid.tolist(), *piece.flatten().tolist()) for grid, piece in zip(few.grid_thw, pieces, strict=True)}
    assert len(seen) == len(few.grid_thw) == len(few.tokens)
    assert sum(few.tokens) * SETTINGS.merge_size**2 == len(few.patches)


def test_gradients_in_float64_are_the_sums_of_all_rows() -> None:
    def gradients(inputs: ModelInputs) -> dict[str, Tensor]:
        model = vision_model().double()
        adapt_for_packing(model)
        scorer: Any = TokenScorer(model, 64)
        assert inputs.vision is not None
        vision = replace(inputs.vision, patches=inputs.vision.patches.double())
        with KeepFloat64():
            scores = scorer(replace(inputs, vision=vision), 1.0, False).log_probs
            every = PackedInputs(vision=SETTINGS).collect(scores, inputs)
            (every * torch.linspace(-1, 1, len(every), dtype=torch.float64)).sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    few, every = (gradients(inputs) for inputs in both(rows()))
    assert few.keys() == every.keys()
    assert any("visual" in name for name in few)
    for name, grad in every.items():
        torch.testing.assert_close(few[name], grad, rtol=1e-9, atol=1e-12, msg=name)


def patches_read(built: Any, patch: pytest.MonkeyPatch) -> list[int]:
    """How many patches each call of the tower gets, in order."""
    seen: list[int] = []
    embed = built.executor.model.model.visual.patch_embed
    plain = embed.forward

    def forward(patches: Tensor) -> Tensor:
        seen.append(len(patches))
        out: Tensor = plain(patches)
        return out

    patch.setattr(embed, "forward", forward)
    return seen


@pytest.mark.parametrize("vision", ["trained", "frozen"])
@pytest.mark.parametrize("make", [rows, lambda: samples() + samples()], ids=["pictures", "videos too"])
def test_steps_are_those_of_padded_rows(make: Any, vision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    curves, scores, read = [], [], dict[str, list[int]]()
    batch = make_batch(make())
    for batching in ("packed", "padded"):
        config = EngineConfig(
            device="cpu", lr=1e-2, eps=1e-3, max_tokens_per_rank=256, batching=batching, vision=vision, recheck_every=0
        )
        built = build_engine(config, vision_model())
        read[batching] = patches_read(built, monkeypatch)
        scores.append(built.forward(batch)["log_probs"].values())
        curves.append([built.train_batch(batch, GRPO()) for _ in range(3)])
    torch.testing.assert_close(*scores, rtol=1e-5, atol=1e-5)
    for mine, other in zip(*curves, strict=True):
        for name in ("loss", "grad_norm", "mismatch/kl"):
            assert mine[name] == pytest.approx(other[name], rel=2e-4, abs=1e-6), name
    every = sum(len(sample[PATCHES]) + len(sample[VIDEO]) for sample in make())
    assert read["padded"][0] == every
    assert read["packed"][0] == (3 * 16 if make is rows else every // 2)


def test_positions_of_equal_texts_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their pictures show; and a patch that is no number is told of its own sample."""
    calls: list[int] = []

    def counted(types: Tensor, *rest: Any) -> Tensor:
        calls.append(len(types))
        return sequence_positions(types, *rest)

    monkeypatch.setattr("engines.media.media_batch.sequence_positions", counted)
    made = with_positions(view_batch(make_batch(rows())), SETTINGS)
    assert len(calls) == 2  # texts, of three pictures
    found = made.flat("position_ids").split(list(made.lengths), dim=1)
    for one, sample in zip(found, rows(), strict=True):
        assert one.equal(sequence_positions(sample["mm_token_type_ids"], sample["image_grid_thw"]))
    odd = rows()
    odd[4][PATCHES][0, 0] = torch.nan
    with pytest.raises(ValueError, match="sample 4: pixel_values must be finite"):
        with_positions(view_batch(make_batch(odd)), SETTINGS)
    wrong = rows()
    wrong[5]["input_ids"][3] = 7
    with pytest.raises(ValueError, match=r"sample 5: .* says 1 of a token 7"):
        with_positions(view_batch(make_batch(wrong)), SETTINGS)
