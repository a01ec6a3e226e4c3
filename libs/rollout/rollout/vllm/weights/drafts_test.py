"""What may draft: the checkpoint's own head or no model, since all weights come from the trainer."""

from typing import Any

import pytest
import torch

from rollout.vllm.weights.drafts import draft_refusal, recorded

HEADED = ["model.embed_tokens.weight", "mtp.fc.weight"]


@pytest.mark.parametrize("settings", [None, {}, {"method": "mtp", "num_speculative_tokens": 1}, {"method": "ngram"}])
def test_the_own_head_and_what_needs_no_weights_are_taken(settings: Any) -> None:
    assert draft_refusal({"speculative_config": settings}, HEADED) is None


@pytest.mark.parametrize("settings", [{"model": "/small"}, {"method": "eagle3", "model": "/head"}, {"method": "eagle"}])
def test_a_draft_model_that_would_stay_random_is_refused(settings: Any) -> None:
    assert "would keep random weights" in str(draft_refusal({"speculative_config": settings}, HEADED))


def test_a_checkpoint_without_the_head_is_refused() -> None:
    why = draft_refusal({"speculative_config": {"method": "mtp"}}, ["model.embed_tokens.weight"])
    assert "no mtp.* tensors" in str(why)


def test_what_the_head_reads_is_noted_and_everything_is_passed_on() -> None:
    names = ["model.language_model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "mtp.norm.weight"]
    kept: dict[str, torch.Tensor] = {}
    passed = list(recorded(((name, torch.ones(1)) for name in [*names, "lm_head.weight"]), kept))
    assert [name for name, _ in passed] == [*names, "lm_head.weight"]
    assert sorted(kept) == ["lm_head.weight", names[0], names[2]]
