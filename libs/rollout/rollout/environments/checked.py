"""Checks of what an environment returns: types, sizes, finite numbers, text that a tokenizer takes.

What is wrong fails its episode alone; the reason has the file and line of the method that returned it.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, TypeVar, cast

from rollout.environments.environment import LARGEST, Observation, Score, StepResult
from rollout.errors import EpisodeFailed
from rollout.tools.tool import Tool

T = TypeVar("T", Observation, StepResult, Score)
MAX_CHARACTERS = 10_000_000  # of all the messages of one result


def checked(value: object, kind: type[T], environment: object, method: str) -> T:
    """Return what a method of an environment returned, its numbers as floats.

    Raises:
        EpisodeFailed: it is of another type, or something in it can be no part of an episode.
    """
    problem = (
        f"a {type(value).__name__}, a rollout.{kind.__name__} is needed"
        if not isinstance(value, kind)
        else next(_problems(value), None)
    )
    if problem is not None:
        raise EpisodeFailed(f"{where(environment, method)}: {method}() returned {problem}", retryable=False)
    result: Any = value
    if isinstance(value, Score):
        components = {name: float(part) for name, part in value.reward_components.items()}
        result = Score(float(value.reward), components, map(float, value.turn_rewards))
    elif isinstance(value, StepResult):
        metrics = {name: float(number) for name, number in value.metrics.items()}
        result = replace(value, messages=tuple(value.messages), done=bool(value.done), metrics=metrics)
    return cast(T, result)


def where(environment: Any, method: str) -> str:
    """Return the file and line of an environment's method; its class where there is no source."""
    while (inner := getattr(environment, "_environment", None)) is not None:
        environment = inner
    function = inspect.unwrap(getattr(type(environment), method, environment))
    code = getattr(function, "__code__", None)
    return type(environment).__qualname__ if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


def _problems(value: Observation | StepResult | Score) -> Iterator[str]:
    """Yield what is wrong with a result."""
    if isinstance(value, Score):
        turns = {f"the reward of turn {turn}": number for turn, number in enumerate(value.turn_rewards, 1)}
        yield from _numbers({"a reward": value.reward} | dict(value.reward_components) | turns)
        return
    yield from _messages(value.messages, "messages")
    if isinstance(value, Observation):
        if not all(isinstance(tool, Tool) for tool in value.tools):
            yield "tools that are no rollout.Tool"
        return
    if value.done not in (True, False):
        yield f"done={value.done!r:.40}, True or False is needed"
    if value.context is not None:
        yield from _messages(value.context, "context")
    if not isinstance(value.metrics, Mapping):
        yield f"metrics of type {type(value.metrics).__name__}, a mapping is needed"
    else:
        yield from _numbers(value.metrics)


def _numbers(values: Mapping[Any, Any]) -> Iterator[str]:
    for name, number in values.items():
        if not isinstance(name, str) or not isinstance(number, Real) or not abs(cast(float, number)) <= LARGEST:
            yield f"{name!r:.80} = {number!r:.80}: a number that float32 holds is needed, under a name"


def _messages(messages: Any, what: str) -> Iterator[str]:
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        yield f"{what} of type {type(messages).__name__}, a list of messages is needed"
        return
    characters = 0
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            yield f"{what}[{number}] = {message!r:.80}: a message is a mapping with a role"
            return
        content = message.get("content")
        if not isinstance(content, str | list | tuple | None):
            yield f"{what}[{number}] whose content is a {type(content).__name__}: a text or a list of parts is needed"
        for text in _texts(message):
            characters += len(text)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                yield f"{what}[{number}] with a lone surrogate ({text[error.start]!r}), which is no text"
    if characters > MAX_CHARACTERS:
        yield f"{what} of {characters} characters, at most {MAX_CHARACTERS} can be read"


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _texts(name)
            yield from _texts(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _texts(part)
