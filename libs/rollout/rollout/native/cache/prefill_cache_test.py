"""Read prompts are kept up to a bound on their tokens, the newest of them, and no fewer than fit."""

import torch

from rollout.native.cache.prefill_cache import PrefillCache


def test_the_oldest_go_and_as_many_stay_as_fit() -> None:
    known: PrefillCache[str] = PrefillCache(max_tokens=10)
    prompts = [tuple([i] * 4) for i in range(8)]
    for i, prompt in enumerate(prompts):
        known.add([prompt], torch.zeros(1, 3), f"prefill {i}")
        kept = [p for p in prompts if known.get(p) is not None]
        assert kept == prompts[max(0, i - 1) : i + 1]
    found = known.get(prompts[7])
    assert found is not None
    assert found.past == ("prefill 7", 0)
    known.add([(9,) * 50], torch.zeros(1, 3), "long")  # larger than the bound: the last is always kept
    assert known.get((9,) * 50) is not None
    assert known.get(prompts[7]) is None
    known.clear()
    assert known.get((9,) * 50) is None
