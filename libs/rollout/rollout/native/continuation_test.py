"""The next turn of a conversation goes on from the last one's state: never from a stale one, and never another answer.

The model itself, one whole sequence at a time, is what everything is held to.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from rollout.config import DecoderChoice
from rollout.engine import Completion, Sampling
from rollout.native.decoders.module_decoder import ModuleDecoder
from rollout.native.engine import NativeEngine
from rollout.native.lean.lean_decoder import LeanDecoder
from rollout.native.scheduler.batch import ContinuousBatch
from rollout.native.scheduler.request import SequenceRequest
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of

VOCAB = 48
OLD, NEW = tiny_model(VOCAB, layers=4), tiny_model(VOCAB, layers=4, seed=5)


@torch.no_grad()
def exact(model: PreTrainedModel, prompt: Sequence[int], done: Completion, bound: float = 1e-5) -> None:
    """A completion's log-probs are those of one plain pass over prompt and answer, but for float32's last places."""
    logits = model(input_ids=torch.tensor([[*prompt, *done.ids]]), use_cache=False).logits[0].double()
    expected = torch.log_softmax(logits, -1)[torch.arange(len(prompt), len(prompt) + len(done.ids)) - 1]
    for row, token, log_prob in zip(expected, done.ids, done.log_probs, strict=True):
        assert abs(row[token].item() - log_prob) < bound + 1e-6 * abs(log_prob)


class Talk:
    """A batch, driven step by step, in which conversations are held."""

    def __init__(
        self, decoder: type[LeanDecoder | ModuleDecoder] = LeanDecoder, keep_tokens: int = 10_000, max_rows: int = 4
    ) -> None:
        self.model = copy.deepcopy(OLD)
        self.batch = ContinuousBatch(decoder(self.model), max_rows, 1000, 0.75, 0, keep_tokens)
        self.answers: dict[SequenceRequest, Any] = {}

    def ask(self, prompt: Sequence[int], **how: Any) -> SequenceRequest:
        sampling = Sampling(**({"greedy": True, "max_new_tokens": 6} | how))
        request = SequenceRequest(
            tuple(prompt), sampling, sampling.seed or 0, lambda a: self.answers.__setitem__(request, a)
        )
        self.batch.add(request)
        return request

    @torch.no_grad()
    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.batch.step()

    def answer(self, request: SequenceRequest) -> Any:
        while self.batch.has_work:
            self.step()
        return self.answers[request]

    @torch.no_grad()
    def load(self, model: PreTrainedModel, version: int, recompute: bool = False) -> None:
        self.model.load_state_dict(model.state_dict())
        self.batch.swap(version, recompute)

    def read(self, prompt: Sequence[int], **how: Any) -> tuple[Any, int]:
        """A completion, and how many tokens of its prompt were read for it."""
        before = self.batch.num_prefill_tokens
        done = self.answer(self.ask(prompt, **how))
        return done, self.batch.num_prefill_tokens - before


@pytest.mark.parametrize("decoder", [LeanDecoder, ModuleDecoder])
def test_a_turn_reads_what_is_new_alone(decoder: type[LeanDecoder | ModuleDecoder]) -> None:
    talk = Talk(decoder)
    prompt = [3, 4, 5]
    done, read = talk.read(prompt)
    assert read == 3
    for turn in range(1, 4):
        prompt = [*prompt, *done.ids, 7, 8, 9]
        done, read = talk.read(prompt, max_new_tokens=5 + turn)
        assert read == 4  # the last sampled token, which was never fed, and three of the template
        exact(OLD, prompt, done)


@pytest.mark.parametrize("decoder", [LeanDecoder, ModuleDecoder])
def test_a_turn_that_another_beginning_would_make_is_read_whole(decoder: type[LeanDecoder | ModuleDecoder]) -> None:
    talk = Talk(decoder)
    done, _ = talk.read([3, 4, 5])
    stream = [3, 4, 5, *done.ids[:-1]]
    for prompt in (stream, stream[:-1], [9, *stream[1:], 7], [*stream[:-1], 47 - stream[-1], 7]):
        answer, read = talk.read(prompt, max_new_tokens=1)
        assert read == len(prompt)
        exact(OLD, prompt, answer)
    assert talk.read([*stream, 47 - done.ids[-1]], max_new_tokens=1)[1] == 1  # another token than the sampled one


def test_siblings_begin_from_one_stream_and_their_equal_prompts_are_read_once() -> None:
    talk = Talk()
    done, _ = talk.read([3, 4, 5])
    prompts = [[3, 4, 5, *done.ids, 7], [3, 4, 5, *done.ids, 8], [3, 4, 5, *done.ids, 7]]
    before = talk.batch.num_prefill_tokens
    asked = [talk.ask(p, greedy=False, seed=i) for i, p in enumerate(prompts)]
    for request, prompt in zip(asked, prompts, strict=True):
        exact(OLD, prompt, talk.answer(request))
    assert talk.batch.num_prefill_tokens - before == 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("when", ["before", "under way", "there and back"])
def test_no_state_of_other_weights_is_ever_used(when: str, recompute: bool) -> None:
    """The prefix-cache trap: after a swap a stream is read anew, and so is one that the swap struck under way."""
    talk = Talk()
    request = talk.ask([3, 4, 5], max_new_tokens=9)
    talk.step(3)
    if when != "before":
        talk.load(NEW, 1, recompute)
        talk.step(2)
    if when == "there and back":
        talk.load(OLD, 0, recompute)
        talk.step(1)
    done = talk.answer(request)
    if when == "before":
        talk.load(NEW, 1, recompute)
    now = OLD if when == "there and back" else NEW
    prompt = [3, 4, 5, *done.ids, 7]
    after, read = talk.read(prompt)
    exact(now, prompt, after)
    pure = when != "before" and recompute  # read again by the weights that it ended with
    assert read == (2 if pure else len(prompt))


@pytest.mark.parametrize("decoder", [LeanDecoder, ModuleDecoder])
def test_a_module_that_its_owner_changed_meanwhile_is_noticed(decoder: type[LeanDecoder | ModuleDecoder]) -> None:
    talk = Talk(decoder)
    done, _ = talk.read([3, 4, 5])
    with torch.no_grad():
        for parameter in talk.model.parameters():
            parameter.data.mul_(1.05)
    prompt = [3, 4, 5, *done.ids, 7]
    after, read = talk.read(prompt)
    assert read == len(prompt)
    exact(talk.model, prompt, after)


def test_who_was_cut_off_can_be_gone_on_from() -> None:
    talk = Talk()
    request = talk.ask([3, 4, 5], max_new_tokens=30)
    talk.step(4)
    talk.batch.end(request, "abort")
    cut = talk.answer(request)
    prompt = [3, 4, 5, *cut.ids]
    rest, read = talk.read(prompt, max_new_tokens=30 - len(cut.ids))
    assert read == 1
    exact(OLD, prompt, rest)
    assert (*cut.ids, *rest.ids) == NativeEngine(OLD).generate_batch(
        [[3, 4, 5]], Sampling(greedy=True, max_new_tokens=30)
    )[0].ids


def test_a_row_whose_logits_were_not_finite_is_not_kept() -> None:
    talk = Talk()
    request = talk.ask([3, 4, 5])
    talk.step(2)
    step = talk.batch.decoder.step
    talk.batch.decoder.step = lambda tokens: step(tokens) * float("nan")  # type: ignore[method-assign]
    talk.step()
    talk.batch.decoder.step = step  # type: ignore[method-assign]
    assert isinstance(talk.answer(request), ValueError)
    prompt = [*request.prompt, *request.ids, 7]
    assert talk.read(prompt)[1] == len(prompt)


def test_after_an_error_nothing_is_kept() -> None:
    talk = Talk()
    done, _ = talk.read([3, 4, 5])
    talk.batch.drop_all(RuntimeError("the device is gone"))
    prompt = [3, 4, 5, *done.ids, 7]
    assert talk.read(prompt)[1] == len(prompt)


@pytest.mark.parametrize("decoder", [LeanDecoder, ModuleDecoder])
def test_memory_is_bounded_and_nothing_is_kept_where_told_so(decoder: type[LeanDecoder | ModuleDecoder]) -> None:
    for bound in (0, 1, 20, 150):
        talk = Talk(decoder, keep_tokens=bound)
        for i in range(6):
            for j in range(4):
                talk.ask([3 + i, 3 + j] * 5)
            talk.answer(talk.ask([3 + i, 9] * 5))
            assert talk.batch._kept.tokens <= bound
        assert (len(talk.batch._kept) > 0) == (bound > 20)


TURNS = st.lists(
    st.tuples(
        st.integers(0, 2),  # the conversation that goes on
        st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=8),  # what is said to it
        st.integers(1, 6),
        st.one_of(st.none(), st.integers(0, 5)),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize(("decoder", "keep_tokens"), [("lean", 150), ("lean", 100_000), ("module", 300)])
@settings(max_examples=10, deadline=None)
@given(script=TURNS)
def test_answers_are_those_of_an_engine_that_keeps_nothing(
    decoder: DecoderChoice, keep_tokens: int, script: list[tuple[int, list[int], int, int | None]]
) -> None:
    with_, without = (NativeEngine(OLD, decoder=decoder, keep_tokens=n) for n in (keep_tokens, 0))
    streams = [[3], [3, 4], [9] * 9]
    for at, said, count, seed in script:
        how = Sampling(max_new_tokens=count, **({"greedy": True} if seed is None else {"seed": seed}))
        prompt = [*streams[at], *said]
        done, expected = (engine.generate_batch([prompt], how)[0] for engine in (with_, without))
        assert done.ids == expected.ids
        exact(OLD, prompt, done)
        streams[at] = [*prompt, *done.ids]
    assert with_.num_prefill_tokens <= without.num_prefill_tokens


def test_an_engine_forgets_at_new_weights_and_when_told() -> None:
    engine = NativeEngine(copy.deepcopy(OLD))
    ask = functools.partial(engine.generate_batch, sampling=Sampling(greedy=True, max_new_tokens=5))

    def reads(prompt: Sequence[int]) -> tuple[int, list[int]]:
        before = engine.num_prefill_tokens
        done = ask([prompt])[0]
        exact(engine._model, prompt, done)
        return engine.num_prefill_tokens - before, [*prompt, *done.ids, 7]

    read, turn = reads([3, 4, 5])
    read, turn = reads(turn)
    assert read == 2
    engine.load_weights(1, pieces_of(NEW.named_parameters()))
    read, turn = reads(turn)
    assert read == len(turn) - 6
    engine.forget()
    read, turn = reads(turn)
    assert read == len(turn) - 6
    read, turn = reads(turn)
    assert read == 2


def test_the_bound_is_a_count() -> None:
    with pytest.raises(ValueError, match="keep_tokens"):
        NativeEngine(OLD, keep_tokens=-1)
