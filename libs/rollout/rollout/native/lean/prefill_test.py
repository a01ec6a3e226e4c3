"""Where the tokens of picked prompts stand."""

import torch

from rollout.native.lean.prefill import PackedCache, spans

CPU = torch.device("cpu")


def test_spans_stand_one_after_another() -> None:
    assert spans([7, 0, 30], [2, 3, 1], CPU).tolist() == [7, 8, 0, 1, 2, 30]


def test_picked_prompts_are_found_in_any_order_and_twice() -> None:
    cache = PackedCache.of([2, 3, 1], CPU)
    assert cache.tokens_of([1, 0, 1]).tolist() == [2, 3, 4, 0, 1, 2, 3, 4]
