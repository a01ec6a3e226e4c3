"""Continuous batching, step by step: who joins and leaves when, what is computed once, what a swap changes."""

import copy
from collections.abc import Sequence
from typing import Any, Never

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject
from transformers import PreTrainedModel

from rollout.engine import Completion, Sampling, StopReason
from rollout.errors import NotFiniteError
from rollout.native.decoders.module_decoder import ModuleDecoder
from rollout.native.lean.lean_decoder import LeanDecoder
from rollout.native.scheduler.batch import ContinuousBatch
from rollout.native.scheduler.request import SequenceRequest
from rollout.testing.model import tiny_dense_model, tiny_model

VOCAB = 48


class Play:
    """A batch over a tiny model, and what it answered."""

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        decoder: type[LeanDecoder | ModuleDecoder] = LeanDecoder,
        max_rows: int = 4,
        prefill_tokens: int = 1000,
        compact_below: float = 0.75,
        keep_tokens: int = 0,
    ) -> None:
        self.model = tiny_model(VOCAB, layers=2) if model is None else model
        self.batch = ContinuousBatch(decoder(self.model), max_rows, prefill_tokens, compact_below, 0, keep_tokens)
        self.answers: dict[SequenceRequest, list[Any]] = {}

    def ask(self, prompt: Sequence[int], **sampling: Any) -> SequenceRequest:
        settings_ = Sampling(**({"greedy": True} | sampling))
        request = SequenceRequest(
            tuple(prompt), settings_, settings_.seed or 0, lambda a: self.answers[request].append(a)
        )
        self.answers[request] = []
        self.batch.add(request)
        return request

    @torch.no_grad()
    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.batch.step()

    def drain(self) -> None:
        while self.batch.has_work:
            self.step()

    def answer(self, request: SequenceRequest) -> Any:
        (answer,) = self.answers[request]
        return answer

    @torch.no_grad()
    def load(self, other: PreTrainedModel, version: int, recompute: bool = False) -> None:
        for mine, theirs in zip(self.model.parameters(), other.parameters(), strict=True):
            mine.copy_(theirs)
        self.batch.swap(version, recompute)


@torch.no_grad()
def teacher_forced(model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], at: int) -> float:
    """The log-prob of ids[at] under the model's own forward pass."""
    logits = model(input_ids=torch.tensor([[*prompt, *ids[:at]]]), use_cache=False).logits[0, -1].double()
    found: float = torch.log_softmax(logits, -1)[ids[at]].item()
    return found


def test_a_short_request_beside_long_ones_waits_for_one_step() -> None:
    play = Play()
    long = [play.ask([3 + i], max_new_tokens=100) for i in range(3)]
    play.step(10)
    short = play.ask([9, 9], max_new_tokens=1)
    before = play.batch.decode_steps
    play.step()
    assert len(play.answer(short).ids) == 1
    assert play.batch.decode_steps - before <= 1
    assert all(len(r.ids) == 12 for r in long)  # nobody missed a step meanwhile


def test_staggered_requests_share_their_steps() -> None:
    play = Play()
    for i in range(4):
        play.ask([3 + i], max_new_tokens=21)
        play.step(5)
    play.drain()
    assert play.batch.decode_steps == 20 + 3 * 5


def test_who_waits_takes_the_first_free_slot_in_order_of_arrival() -> None:
    play = Play(max_rows=2)
    a, b, c, d = (play.ask([3 + i], max_new_tokens=n) for i, n in enumerate((9, 3, 9, 9)))
    play.step()
    assert [r.slot for r in (a, b, c, d)] == [0, 1, None, None]
    play.step()
    assert len(play.answer(b).ids) == 3
    play.step()
    assert [r.slot for r in (a, c, d)] == [0, 1, None]


def test_requests_that_their_first_token_ends_take_no_slot_and_need_no_step() -> None:
    play = Play(max_rows=2)
    for i in range(7):
        play.ask([3 + i], max_new_tokens=1)
    play.step()
    assert play.batch.decode_steps == 0
    assert all(len(a) == 1 for a in play.answers.values())


def test_a_prompt_is_read_once_however_late_its_siblings_come() -> None:
    play = Play()
    play.ask([3, 4, 5], max_new_tokens=30)
    play.ask([3, 4, 5], max_new_tokens=30, greedy=False, seed=1)
    play.step(4)
    late = play.ask([3, 4, 5], max_new_tokens=5)
    play.step(6)
    assert play.batch.num_prefill_tokens == 3
    assert play.answer(late).ids == tuple(play.batch.running[0].ids[:5])
    play.load(tiny_model(VOCAB, layers=2, seed=5), 1)
    play.ask([3, 4, 5], max_new_tokens=2)
    play.step()
    assert play.batch.num_prefill_tokens == 6  # not from the old weights' caches


def test_nothing_is_kept_once_nothing_runs() -> None:
    play = Play()
    for _ in range(2):
        play.ask([3, 4, 5], max_new_tokens=3)
        play.drain()
    assert play.batch.num_prefill_tokens == 6
    with torch.no_grad():
        play.model.model.norm.weight.add_(1.0)  # changed by its owner while the batch is idle: noticed
    changed = play.ask([3, 4, 5], max_new_tokens=3)
    play.drain()
    for at, log_prob in enumerate(play.answer(changed).log_probs):
        assert abs(log_prob - teacher_forced(play.model, [3, 4, 5], play.answer(changed).ids, at)) < 1e-5


def test_prefills_are_bounded_and_old_prompts_forgotten_first() -> None:
    play = Play(max_rows=8, prefill_tokens=10)
    sizes: list[list[int]] = []
    prefill = play.batch.decoder.prefill

    def counted(prompts: Sequence[Sequence[int]], pasts: Any = None) -> Any:
        assert pasts is None
        sizes.append([len(p) for p in prompts])
        return prefill(prompts)

    play.batch.decoder.prefill = counted  # type: ignore[method-assign]
    prompts = [[3] * n for n in (4, 5, 6, 12, 2)]
    for prompt in prompts:
        play.ask(prompt, max_new_tokens=20)
    play.step()
    assert sizes == [[2, 4], [5], [6], [12]]
    play.ask(prompts[3], max_new_tokens=2)  # of the last prefill
    play.ask(prompts[0], max_new_tokens=2)
    play.step()
    assert sizes[4:] == [[4]]


@pytest.mark.parametrize("decoder", [LeanDecoder, ModuleDecoder])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_swap_between_two_steps_is_told_token_by_token(
    decoder: type[LeanDecoder | ModuleDecoder], recompute: bool
) -> None:
    old, new = tiny_model(VOCAB, layers=2), tiny_model(VOCAB, layers=2, seed=5)
    play = Play(copy.deepcopy(old), decoder)
    request = play.ask([3, 4, 5], max_new_tokens=12)
    other = play.ask([7] * 9, max_new_tokens=12)
    play.step(4)
    play.load(new, 7, recompute)
    play.drain()
    for r in (request, other):
        done = play.answer(r)
        assert done.policy_versions == (0,) * 5 + (7,) * 7
        exact = [
            abs(p - teacher_forced(old if v == 0 else new, r.prompt, done.ids, at)) < 1e-5
            for at, (p, v) in enumerate(zip(done.log_probs, done.policy_versions, strict=True))
        ]
        assert all(exact[:5])
        assert all(exact[5:]) == recompute  # kept caches are the old weights': later log-probs are of the mixture


def test_logits_that_are_not_finite_fail_their_row_alone() -> None:
    play = Play()
    bad, good = play.ask([3], max_new_tokens=5), play.ask([4], max_new_tokens=5)
    step = play.batch.decoder.step

    def nan_first(tokens: torch.Tensor) -> torch.Tensor:
        return step(tokens).index_fill(0, torch.tensor([0]), float("nan"))

    play.batch.decoder.step = nan_first  # type: ignore[method-assign]
    play.step()
    play.batch.decoder.step = step  # type: ignore[method-assign]
    play.drain()
    assert isinstance(play.answer(bad), NotFiniteError)
    assert len(play.answer(good).ids) == 5


@pytest.mark.parametrize("broken", ["prefill", "place", "step"])
def test_after_an_error_everyone_is_answered_and_the_next_are_served(broken: str) -> None:
    play = Play(max_rows=2)
    first = [play.ask([3 + i], max_new_tokens=5) for i in range(2)]
    if broken == "step":
        play.step()
    else:
        first.append(play.ask([9], max_new_tokens=5))
    whole = getattr(play.batch.decoder, broken)

    def fail(*_: object) -> Never:
        raise RuntimeError("out of memory")

    setattr(play.batch.decoder, broken, fail)
    with pytest.raises(RuntimeError) as caught:
        play.step(3)
    play.batch.drop_all(caught.value)
    assert all(isinstance(play.answer(r), RuntimeError) for r in first)
    assert not play.batch.has_work
    setattr(play.batch.decoder, broken, whole)
    after = play.ask([3], max_new_tokens=2)
    play.drain()
    assert len(play.answer(after).ids) == 2


OLD, NEW = tiny_model(VOCAB, layers=2), tiny_model(VOCAB, layers=2, seed=5)
PROMPTS = [(3,), (4, 5), (3,) * 7, tuple(range(2, 20)), (4, 5, 6)]
DENSE = tiny_dense_model(VOCAB), tiny_dense_model(VOCAB, seed=5)
ALONE: dict[tuple[Any, ...], Completion] = {}


def alone(
    models: tuple[PreTrainedModel, PreTrainedModel], model_index: int, prompt: tuple[int, ...], sampling: Sampling
) -> Completion:
    """What the request gets with nobody beside it."""
    key = (models[0].config.model_type, model_index, prompt, sampling)
    if key not in ALONE:
        play = Play(copy.deepcopy(models[model_index]))
        request = SequenceRequest(prompt, sampling, sampling.seed or 0, lambda a: play.answers[request].append(a))
        play.answers[request] = []
        play.batch.add(request)
        play.drain()
        ALONE[key] = play.answer(request)
    return ALONE[key]


class Traffic(RuleBasedStateMachine):
    """Arrivals, next turns, cancels, pauses, swaps and steps in any order."""

    recompute = True
    models: tuple[PreTrainedModel, PreTrainedModel] = (OLD, NEW)

    def __init__(self) -> None:
        super().__init__()
        self.play = Play(copy.deepcopy(self.models[0]), max_rows=3, prefill_tokens=12, keep_tokens=200)
        self.batch = self.play.batch
        self.begun: list[SequenceRequest] = []
        self.ended: set[SequenceRequest] = set()

    @rule(
        prompt=st.sampled_from(PROMPTS),
        count=st.integers(1, 7),
        seed=st.one_of(st.none(), st.integers(0, 3)),
        stops=st.sampled_from([(), tuple(range(2, 9))]),
    )
    def arrive(self, prompt: tuple[int, ...], count: int, seed: int | None, stops: tuple[int, ...]) -> None:
        how = {"greedy": True} if seed is None else {"greedy": False, "seed": seed, "temperature": 1.0 + seed}
        self.begun.append(self.play.ask(prompt, max_new_tokens=count, stop_token_ids=stops, **how))

    @precondition(lambda self: any(r.done for r in self.begun))
    @rule(data=st.data(), said=st.sampled_from([(7,), (7, 8, 9)]), count=st.integers(1, 5))
    def go_on(self, data: DataObject, said: tuple[int, ...], count: int) -> None:
        before = data.draw(st.sampled_from([r for r in self.begun if r.done]))
        if len(before.prompt) < 24:
            prompt = (*before.prompt, *before.ids, *said)
            self.begun.append(self.play.ask(prompt, max_new_tokens=count))

    @rule(count=st.integers(1, 3))
    def step(self, count: int) -> None:
        self.play.step(count)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), reason=st.sampled_from(["abort", "deadline"]))
    def end(self, data: DataObject, reason: StopReason) -> None:
        request = data.draw(st.sampled_from(self.begun))
        if not request.done:
            self.ended.add(request)
        self.batch.end(request, reason)
        self.batch.end(request, reason)

    @rule(held=st.booleans())
    def hold(self, held: bool) -> None:
        self.batch.paused = held

    @rule()
    def swap(self) -> None:
        version = self.batch.version + 1
        self.play.load(self.models[version % 2], version, self.recompute)

    @invariant()
    def everyone_is_in_one_place(self) -> None:
        running = self.batch.running
        assert len(running) <= 3
        assert len(set(running)) == len(running)
        rows = self.batch._rows
        assert all(r is None or (r.slot is not None and rows[r.slot] is r) for r in rows)
        done = [r for r in self.begun if r.done]
        assert len(done) + len(running) + self.batch.waiting == len(self.begun)
        for request, answers in self.play.answers.items():
            assert len(answers) == request.done
            assert request.versions == sorted(request.versions)

    def teardown(self) -> None:
        self.batch.paused = False
        self.play.drain()
        assert not self.batch.running
        assert not self.batch.waiting
        for request in self.begun:
            self.check(request, self.play.answer(request))

    def check(self, request: SequenceRequest, answer: Completion) -> None:
        assert len(answer.ids) == len(answer.log_probs) == len(answer.policy_versions)
        assert (answer.stop_reason in ("abort", "deadline")) == (request in self.ended)
        versions = set(answer.policy_versions)
        if len(versions) == 1:
            expected = alone(self.models, versions.pop() % 2, request.prompt, request.sampling)
            assert expected.ids[: len(answer.ids)] == answer.ids
            if request not in self.ended:
                assert expected.ids == answer.ids
                assert expected.stop_reason == answer.stop_reason
        elif request.sampling.greedy:
            for at, (log_prob, version) in enumerate(zip(answer.log_probs, answer.policy_versions, strict=True)):
                model = self.models[version % 2]
                assert abs(log_prob - teacher_forced(model, request.prompt, answer.ids, at)) < 1e-4
        assert self.batch._kept.tokens <= 200


class DenseTraffic(Traffic):
    """The same over softmax attention alone."""

    models = DENSE


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestDenseTraffic = DenseTraffic.TestCase
TestDenseTraffic.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
