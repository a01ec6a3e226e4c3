"""Read prompts are kept up to a bound on their tokens, the newest of them, and no fewer than fit."""

import sys
import threading

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
    known.add([(1,), (2,)], torch.zeros(2, 3), "two")
    assert [entry.past.cache for entry in known.caches] == ["two"]
    known.clear()
    assert known.get((9,) * 50) is None


def test_another_thread_may_ask_what_is_held_while_prefills_come_and_go() -> None:
    known: PrefillCache[str] = PrefillCache(max_tokens=6)
    logits, ended = torch.zeros(2, 3), threading.Event()

    def sample() -> None:
        for i in range(20_000):
            known.add([(i,), (i, 1)], logits, "cache")
            if i % 3 == 0:
                known.clear()
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=sample)
    try:
        thread.start()
        while not ended.is_set():
            assert all(entry.past.cache == "cache" for entry in known.caches)
    finally:
        sys.setswitchinterval(interval)
        thread.join()
