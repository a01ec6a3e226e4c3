"""Servers that can't be trained on, fail or refuse: each is an error that says what to do, and never an answer."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

import pytest

from rollout.config import RolloutConfig
from rollout.engine import Completion, OnTokens, RolloutEngine, Sampling
from rollout.native.engine import NativeEngine
from rollout.openai.engine import OpenAIEngine
from rollout.openai.settings.config import OpenAIConfig
from rollout.testing.completions import CompletionServer
from rollout.testing.model import tiny_model

Change = Callable[[dict[str, Any]], dict[str, Any] | None]
VOCAB = 48
PROMPTS = [[3, 3, 7, 9]]
ANSWER = Sampling(max_new_tokens=8, seed=0)
LONG = Sampling(max_new_tokens=200, seed=1)


@pytest.fixture(scope="module")
def behind() -> NativeEngine:
    """The engine behind the server, which the test may ask too."""
    return NativeEngine(tiny_model(VOCAB))


@pytest.fixture
def served(behind: NativeEngine) -> Iterator[CompletionServer]:
    """The server, its address in `url`."""
    server = CompletionServer(behind)
    with server.open():
        yield server


@pytest.fixture
def engine(served: CompletionServer) -> OpenAIEngine:
    return engine_at(served.url, version=7)


def engine_at(url: str, version: int = 0, own: dict[str, Any] | None = None, **changes: Any) -> OpenAIEngine:
    config = RolloutConfig(backend="openai", openai=OpenAIConfig(url, **own or {}), **changes)
    return OpenAIEngine(config, version)


class Stalling:
    """An engine that tells two tokens of a long answer, and never ends it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    async def generate(self, prompt: Sequence[int], sampling: Sampling, on_tokens: OnTokens) -> Completion:
        if sampling.max_new_tokens < LONG.max_new_tokens:
            return await self.engine.generate(prompt, sampling, on_tokens=on_tokens)
        for token in (3, 4):
            on_tokens((token,), (-1.0,))
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")


def with_choice(**changes: Any) -> Change:
    """Every event says this of its choice."""
    return lambda event: event | {"choices": [event["choices"][0] | changes]}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (with_choice(token_ids=None), "does not tell token ids"),
        (with_choice(logprobs=None), "2 token ids and 0 log-probs"),
        (with_choice(logprobs={"token_logprobs": [-1.0]}), "2 token ids and 1 log-probs"),
        (with_choice(logprobs={"token_logprobs": [None, -1.0]}), "must tell one each"),
        (with_choice(logprobs={"token_logprobs": [0.5, -1.0]}), "must tell one each"),
        (with_choice(token_ids=[], logprobs={"token_logprobs": []}), "without a token"),
    ],
)
def test_a_server_that_does_not_tell_what_training_needs_is_refused_at_the_start(
    served: CompletionServer, change: Change, problem: str
) -> None:
    served.change = change
    with pytest.raises(ValueError, match=problem):
        engine_at(served.url)


def test_raw_log_probs_are_noticed_and_do_for_the_whole_distribution_alone(served: CompletionServer) -> None:
    """Log-probs of the model in place of those sampled from: with a top-k of 1 they are not 0."""
    served.change = with_choice(logprobs={"token_logprobs": [-0.5, -0.25]})
    engine = engine_at(served.url)
    served.change = lambda event: event
    for sampling in (
        replace(ANSWER, temperature=0.7),
        replace(ANSWER, top_k=4),
        replace(ANSWER, top_p=0.9),
        replace(ANSWER, min_p=0.1),
    ):
        with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
            asyncio.run(engine.generate(PROMPTS[0], sampling))
    assert len(asyncio.run(engine.generate(PROMPTS[0], ANSWER)).ids) == 8


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda event: None, "ended its stream before the answer was whole"),
        (lambda event: {"error": {"message": "out of memory"}}, "broke off: out of memory"),
        (with_choice(finish_reason="stop"), "stop tokens of its own"),
        (with_choice(finish_reason="content_filter"), "'content_filter', which nobody asked for"),
        (lambda event: impossible(event), "must tell one each"),
    ],
)
def test_a_stream_that_goes_wrong_is_an_error_and_no_answer(
    engine: OpenAIEngine, served: CompletionServer, change: Change, problem: str
) -> None:
    served.change = at_event(3, change)
    with pytest.raises(RuntimeError, match=problem):
        asyncio.run(engine.generate(PROMPTS[0], ANSWER))
    assert engine.load().running == 0


def impossible(event: dict[str, Any]) -> dict[str, Any] | None:
    """Tokens of probability 0, as many as the event has."""
    choice = event["choices"][0]
    return with_choice(logprobs={"token_logprobs": [float("-inf")] * len(choice["token_ids"])})(event)


def at_event(number: int, change: Change) -> Change:
    """Event `number` of a stream, from 1, is changed, or its last: tokens that come at once are told in one event."""
    events: list[dict[str, Any]] = []

    def changed(event: dict[str, Any]) -> dict[str, Any] | None:
        events.append(event)
        last = len(events) < number and event["choices"][0]["finish_reason"] is not None
        return change(event) if last or len(events) == number else event

    return changed


@pytest.mark.parametrize(
    ("code", "kind"), [(400, ValueError), (404, ValueError), (500, RuntimeError), (None, RuntimeError)]
)
def test_a_refusal_may_come_in_a_stream_that_has_begun(
    engine: OpenAIEngine, served: CompletionServer, code: int | None, kind: type[Exception]
) -> None:
    """As vLLM's server refuses an id outside its tokenizer: its status is 200 by then."""
    error = {"message": "Token id 300 is out of vocabulary", "type": "BadRequestError", "code": code}
    served.change = at_event(1, lambda event: {"error": error})
    with pytest.raises(
        kind, match=r"refuses a request \(40.\): Token id" if kind is ValueError else "broke off: Token"
    ):
        asyncio.run(engine.generate(PROMPTS[0], ANSWER))
    assert engine.load().running == 0


def test_a_server_that_dies_in_mid_answer_is_told(behind: NativeEngine) -> None:
    server = CompletionServer(cast(RolloutEngine, Stalling(behind)))

    async def ask(engine: RolloutEngine, served: ExitStack) -> None:
        begun = asyncio.Event()
        task = asyncio.create_task(engine.generate(PROMPTS[0], LONG, on_tokens=lambda *_: begun.set()))
        await begun.wait()
        await asyncio.to_thread(served.close)
        with pytest.raises(RuntimeError, match="broke off"):
            await task

    with ExitStack() as served:
        url = served.enter_context(server.open())
        asyncio.run(ask(engine_at(url), served))
    with pytest.raises(ValueError, match=r"nobody answers at .*start the server first"):
        engine_at(url)


def test_what_the_server_refuses_is_the_callers_error(engine: OpenAIEngine) -> None:
    with pytest.raises(ValueError, match=r"refuses a request \(400\): .*outside the model's vocabulary"):
        asyncio.run(engine.generate([VOCAB], ANSWER))
    for prompt, problem in (([], "empty prompt"), ([-1], "the id -1"), ([3] * 250, "max_length=256")):
        with pytest.raises(ValueError, match=problem):
            asyncio.run(engine.generate(prompt, ANSWER))
    with pytest.raises(ValueError, match="no place for images"):
        asyncio.run(engine.generate([3], ANSWER, {"pixel_values": 1}))


def test_the_key_comes_from_the_environment_and_opens_the_server(
    behind: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompletionServer(behind, key="the key of the test").open() as url:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(ValueError, match=r"refuses the key: .*\$OPENAI_API_KEY"):
            engine_at(url)
        monkeypatch.setenv("OTHER_KEY", "the key of the test")
        engine = engine_at(url, own={"key_variable": "OTHER_KEY"})
        assert len(asyncio.run(engine.generate(PROMPTS[0], ANSWER)).ids) == 8
        assert "the key" not in repr(engine._own)


def test_the_model_is_named_where_there_is_a_choice(served: CompletionServer) -> None:
    with pytest.raises(ValueError, match="has the models policy: name one"):
        engine_at(served.url, own={"model": "other"})
    assert engine_at(served.url, own={"model": "policy"})
    served.max_length = None
    with pytest.raises(ValueError, match="set max_length"):
        engine_at(served.url)
    assert engine_at(served.url, max_length=20)
