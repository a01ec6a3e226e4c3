"""Prompts that rows share enter the model once: scores and gradients are those of whole rows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import EngineConfig, build_engine
from engines.execution.micro_batches import MicroBatch
from engines.inputs.model_inputs import ModelInputs, PackedInputs
from engines.inputs.shared_prefixes import shares_prefixes, with_shared_prefixes
from engines.media.vision_settings import VisionSettings
from engines.prove.float64 import KeepFloat64
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.read_rows import compute_read_rows
from engines.scoring.token_scorer import TokenScorer
from engines.testing.images import media_sample
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.testing.vision import SETTINGS, vision_model
from engines.tiny import tiny_model
from objectives import GRPO
from seqpack import pack_sequences
from seqpack.batches.batch import make_batch

Sample = dict[str, Any]
QUESTION = [5, 6, 7, 8, 9, 10]
ANSWERS = ([11, 12], [11, 13, 14], [12])


def text(question: list[int], answer: list[int], trained: list[bool] | None = None) -> Sample:
    mask = [False] * len(question) + (trained or [True] * len(answer))
    return {"input_ids": [*question, *answer], "loss_mask": mask, "advantages": torch.full((len(mask),), 0.5)}


TEXTS = [
    *(text(QUESTION, answer) for answer in ANSWERS),
    text([7, *QUESTION], [11, 12]),
    text(QUESTION[:2], [3, 4, 9, 3, 4], [True, False, False, True, True]),  # a turn that is not its own
    *(text([7, *QUESTION], answer) for answer in ANSWERS),
    text(QUESTION, [11, 12], [False, True]),  # its prefix is longer
]


def pictures() -> list[Sample]:
    """Two pictures with a question each, and several answers."""
    rows = []
    for picture, answer in [(0, [5, 6]), (1, [5, 6]), (0, [7]), (0, [6, 6, 8]), (1, [8, 9])]:
        sample = media_sample(SETTINGS, [3, 4 + len(answer)], [(1, 4, 4)], seed=0)
        sample["input_ids"][len(sample["input_ids"]) - len(answer) :] = torch.tensor(answer)
        sample["loss_mask"] = torch.arange(len(sample["input_ids"])) >= len(sample["input_ids"]) - len(answer)
        drawn = torch.Generator().manual_seed(picture)
        sample["pixel_values"] = torch.randn(sample["pixel_values"].shape, generator=drawn)
        rows.append(sample)
    return rows


def whole(samples: list[Sample], vision: VisionSettings | None) -> ModelInputs:
    one = pack_sequences(make_batch(samples))
    inputs = PackedInputs(vision=vision).inputs(
        MicroBatch(one, tuple(range(len(samples))), one.values["loss_mask"], (0,))
    )
    if inputs.vision is None:
        return inputs
    seen = inputs.vision.distinct()
    return replace(inputs, vision=replace(seen, patches=seen.patches.double()))


def test_by_hand() -> None:
    shared = with_shared_prefixes(whole(TEXTS[:3], None))
    assert shared.context is not None
    assert shared.context.edges == (0, 6, 8, 11, 12)
    assert shared.input_ids.tolist() == [*QUESTION, *ANSWERS[0], *ANSWERS[1], *ANSWERS[2]]
    assert shared.position_ids.tolist() == [*range(6), 6, 7, 6, 7, 8, 6]
    assert shared.rows.tolist() == [5, 6, 5, 8, 9, 5]
    assert shared.targets.tolist() == [11, 12, 11, 13, 14, 12]
    assert shared.read is not None
    assert shared.read.tolist() == [5, 6, 8, 9]


def test_rows_that_share_little_stay_as_they_are() -> None:
    for samples in ([TEXTS[0], TEXTS[3]], [text([3], [4, 5, 6]), text([3], [4, 5, 7])]):
        assert with_shared_prefixes(inputs := whole(samples, None)) is inputs


@pytest.mark.parametrize("kind", ["dense", "attention", "vision"])
def test_scores_and_gradients_in_float64_are_those_of_whole_rows(kind: str) -> None:
    def results(share: bool) -> tuple[Tensor, dict[str, Tensor]]:
        model: Any = (vision_model() if kind == "vision" else tiny_model(kind, scale=2.0)).double()
        adapt_for_packing(model)
        compute_read_rows(model)
        assert shares_prefixes(model)
        inputs = whole(*((pictures(), SETTINGS) if kind == "vision" else (TEXTS, None)))
        if share:
            inputs = with_shared_prefixes(inputs)
            assert inputs.read is not None
        with KeepFloat64():
            scores = TokenScorer(model, 64)(inputs, 1.0, False).log_probs
            (scores * torch.linspace(-1, 1, len(scores), dtype=torch.float64)).sum().backward()
        return scores, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    (scores, gradients), (want, expected) = results(share=True), results(share=False)
    torch.testing.assert_close(scores, want, rtol=1e-9, atol=1e-12)
    assert gradients.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(gradients[name], grad, rtol=1e-8, atol=1e-11, msg=name)


def test_steps_are_those_of_padded_rows() -> None:
    curves = []
    for batching in ("packed", "padded"):
        built = build_engine(
            EngineConfig(device="cpu", lr=1e-2, max_tokens_per_rank=128, batching=batching), tiny_model(scale=2.0)
        )
        curves.append([built.train_batch(make_batch(TEXTS), GRPO()) for _ in range(3)])
    for mine, other in zip(*curves, strict=True):
        for name in ("loss", "grad_norm"):
            assert mine[name] == pytest.approx(other[name], rel=2e-4, abs=1e-6), name
