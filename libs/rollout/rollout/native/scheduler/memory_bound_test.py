"""Caches stay within their bytes whatever is asked, all are answered as without a bound; what can't fit is refused."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import rollout.native.lean.slots as slots
from rollout.engine import Completion, Sampling
from rollout.native.decoders.module_decoder import ModuleDecoder
from rollout.native.engine import NativeEngine
from rollout.native.lean.lean_decoder import LeanDecoder
from rollout.native.scheduler.batch import ContinuousBatch
from rollout.native.scheduler.memory_bound import MemoryBound
from rollout.native.scheduler.request import SequenceRequest
from rollout.testing.model import tiny_dense_model, tiny_model
from seqpack.memory import ledger

VOCAB = 48
MODELS = {"hybrid": tiny_model(VOCAB, layers=2), "dense": tiny_dense_model(VOCAB)}
Asked = tuple[int, int, int]
"""Prompt's number of tokens, its kind, new tokens at most."""
ASKED = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(1, 30)), min_size=1, max_size=12)


class Watched:
    """A batch with a bound, whose bytes are counted at every allocation that lasts."""

    def __init__(self, model: PreTrainedModel, kind: type[LeanDecoder | ModuleDecoder], memory: int | None) -> None:
        self.decoder: Any = kind(copy.deepcopy(model))
        self.batch = ContinuousBatch(self.decoder, 8, 1000, 0.75, 0, 400, memory)
        self.most = 0
        for name in ("prefill", "place", "step", "move", "keep", "reserve"):
            self.watch(name)

    def watch(self, name: str) -> None:
        real = getattr(self.decoder, name)

        def watched(*arguments: Any) -> Any:
            made = real(*arguments)
            self.note(made)
            return made

        setattr(self.decoder, name, watched)

    def note(self, made: Any = None) -> None:
        rows = self.decoder._slots if isinstance(self.decoder, LeanDecoder) else self.decoder._rows
        held = [rows, self.batch._prefixes.caches, self.batch._kept.caches, made]
        found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in ledger.tensors_in(held)}
        self.most = max(self.most, sum(found.values()))

    def ask(self, asked: Sequence[Asked]) -> list[Completion]:
        answers: dict[int, Any] = {}
        for number, (length, kind, new) in enumerate(asked):
            sampling = Sampling(max_new_tokens=new, seed=number, stop_token_ids=(7,))
            self.batch.check(length, sampling)
            prompt = tuple(2 + (kind + 3 * i) % 40 for i in range(length))
            self.batch.add(SequenceRequest(prompt, sampling, number, lambda a, n=number: answers.__setitem__(n, a)))  # type: ignore[misc]
        with torch.no_grad():
            while self.batch.has_work:
                self.batch.step()
                self.note()
        return [answers[number] for number in range(len(asked))]


def alone(watched: Watched, asked: Sequence[Asked]) -> int:
    """The least bytes with which each of these can be answered alone."""
    bound = MemoryBound(watched.decoder, 1)
    return max(bound.alone(length + new) for length, _, new in asked)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", [LeanDecoder, ModuleDecoder])
@settings(max_examples=25, deadline=None)
@given(asked=ASKED, again=ASKED, more=st.floats(0, 6))
def test_bytes_stay_within_the_bound_and_tokens_are_those_without_one(
    kind: type[LeanDecoder | ModuleDecoder], model: str, asked: list[Asked], again: list[Asked], more: float
) -> None:
    free = Watched(MODELS[model], kind, None)
    memory = int((1 + more) * alone(free, [*asked, *again]))
    bound = Watched(MODELS[model], kind, memory)
    real = slots._resized

    def resized(x: torch.Tensor, *sizes: Any) -> torch.Tensor:
        made = real(x, *sizes)
        bound.note([x, made])
        return made

    with pytest.MonkeyPatch.context() as patch:
        for part in (asked, again):  # the second with what the prefix cache has of the first
            patch.setattr(slots, "_resized", real)
            wanted = free.ask(part)
            patch.setattr(slots, "_resized", resized)
            assert [(c.ids, c.stop_reason) for c in bound.ask(part)] == [(c.ids, c.stop_reason) for c in wanted]
    assert 0 < bound.most <= memory
    assert not bound.batch.waiting


def test_rows_wait_for_memory_and_begin_in_order_as_others_end() -> None:
    watched = Watched(MODELS["dense"], LeanDecoder, None)
    one = alone(watched, [(4, 0, 20)])
    watched = Watched(MODELS["dense"], LeanDecoder, 3 * one)
    answered: list[int] = []
    for number in range(6):
        sampling = Sampling(max_new_tokens=20 if number else 2, greedy=True)
        request = SequenceRequest((3 + number,) * 4, sampling, 0, lambda a, n=number: answered.append(n))  # type: ignore[misc]
        watched.batch.add(request)
    with torch.no_grad():
        watched.batch.step()
        begun = len(watched.batch.running) + len(answered)
        assert 0 < begun < 6
        while watched.batch.has_work:
            watched.batch.step()
    assert answered == list(range(6))


def test_a_request_that_has_no_room_alone_is_refused_with_the_numbers() -> None:
    least = alone(Watched(MODELS["dense"], LeanDecoder, None), [(4, 0, 100)])
    engine = NativeEngine(MODELS["dense"], kv_cache_memory_bytes=least)
    words = r"a request of 105 tokens \(4 of the prompt, 101 new ones\) needs .* GiB .* --rollout.kv-cache-memory-gib"
    with pytest.raises(ValueError, match=words):
        engine.generate_batch([[3, 4, 5, 6]], Sampling(max_new_tokens=101))
    assert len(engine.generate_batch([[3, 4, 5, 6]], Sampling(max_new_tokens=100))[0].ids) == 100
    with pytest.raises(ValueError, match="kv_cache_memory_bytes is a number of bytes"):
        NativeEngine(MODELS["dense"], kv_cache_memory_bytes=0)


@pytest.mark.parametrize("recompute", [False, True])
def test_new_weights_in_mid_sampling_keep_the_bound(recompute: bool) -> None:
    free = Watched(MODELS["hybrid"], LeanDecoder, None)
    asked = [(9, n % 3, 12) for n in range(7)]
    memory = 3 * alone(free, asked)
    watched = Watched(MODELS["hybrid"], LeanDecoder, memory)
    answered: list[Completion] = []
    for number, (length, kind, new) in enumerate(asked):
        prompt = tuple(2 + (kind + i) % 40 for i in range(length))
        watched.batch.add(SequenceRequest(prompt, Sampling(max_new_tokens=new), number, answered.append))  # type: ignore[arg-type]
    with torch.no_grad():
        for version in range(1, 40):
            watched.batch.step()
            watched.batch.swap(version, recompute)
            watched.note()
    assert len(answered) == len(asked)
    assert all(len(one.ids) == 12 for one in answered)
    assert watched.most <= memory
