"""Checks of what an environment returns: types, sizes, finite numbers, text that a tokenizer takes.

What is wrong fails its episode alone; the reason has the file and line of the method that returned it. Plain types are
asked for before the abstract ones that cover them, which take many times as long: a step has thousands of results.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from reprlib import repr as shown
from typing import Any, TypeVar, cast

from rollout.environments.environment import LARGEST, Observation, Score, StepResult
from rollout.errors import EpisodeFailed
from rollout.tools.tool import Tool

T = TypeVar("T", Observation, StepResult, Score)
MAX_CHARACTERS = 10_000_000  # of all the messages of one result
MAX_DEPTH = 64  # of lists and mappings in a message


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
        if type(value.reward) is float and not value.reward_components and not value.turn_rewards:
            return cast(T, result)  # the usual case: there is nothing to make a float of
        components = {name: float(part) for name, part in value.reward_components.items()}
        result = Score(float(value.reward), components, map(float, value.turn_rewards))
    elif isinstance(value, StepResult):
        if not value.messages and not value.metrics and type(value.done) is bool:
            return cast(T, result)
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
        for tool in value.tools:
            if not isinstance(tool, Tool) or not isinstance(tool.name, str) or not isinstance(tool.description, str):
                yield f"tools with a {type(tool).__name__}: rollout.Tool with texts as name and description is needed"
            else:
                yield from (f"a tool with {problem}" for problem in _plain(tool.schema, []))
        return
    if value.done not in (True, False):
        yield f"done={value.done!r:.40}, True or False is needed"
    if value.context is not None:
        yield from _messages(value.context, "context")
    if not isinstance(value.metrics, (dict, Mapping)):
        yield f"metrics of type {type(value.metrics).__name__}, a mapping is needed"
    else:
        yield from _numbers(value.metrics)


def _numbers(values: Mapping[Any, Any]) -> Iterator[str]:
    for name, number in values.items():
        is_number = isinstance(number, (float, Real))
        if isinstance(name, str) and not name.isascii():
            yield from (f"{name!r} with {problem}" for problem in _plain(name, []))
        if not isinstance(name, str) or not is_number or not abs(cast(float, number)) <= LARGEST:
            yield f"{shown(name)} = {shown(number)}: a number that float32 holds is needed, under a name"


def _messages(messages: Any, what: str) -> Iterator[str]:
    if not isinstance(messages, (tuple, list, Sequence)) or isinstance(messages, str):
        yield f"{what} of type {type(messages).__name__}, a list of messages is needed"
        return
    counts: list[int] = []
    for number, message in enumerate(messages):
        if not isinstance(message, (dict, Mapping)) or not isinstance(message.get("role"), str):
            yield f"{what}[{number}] = {shown(message)}: a message is a mapping with a role"
            return
        content = message.get("content")
        if not isinstance(content, str | list | tuple | None):
            yield f"{what}[{number}] whose content is a {type(content).__name__}: a text or a list of parts is needed"
        yield from (f"{what}[{number}] with {problem}" for problem in _plain(message, counts))
        calls = message.get("tool_calls") or []
        if not isinstance(calls, list | tuple) or not all(map(_is_call, calls)):
            yield f"{what}[{number}].tool_calls = {shown(calls)}: a list of calls of functions is needed"
    if sum(counts) > MAX_CHARACTERS:
        yield f"{what} of {sum(counts)} characters, at most {MAX_CHARACTERS} can be read"


def _is_call(call: Any) -> bool:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _plain(value: Any, counts: list[int], depth: int = 0, is_image: bool = False) -> Iterator[str]:
    """Yield what is wrong with a value that templates, files and other processes read; add its texts' characters to
    `counts`. It may be text, a number, lists and mappings of such, and, under the key `image`, bytes or a picture."""
    if isinstance(value, str):
        counts.append(len(value))
        if value.isascii():
            return
        try:
            value.encode()
        except UnicodeEncodeError as error:
            yield f"a lone surrogate ({value[error.start]!r}), which is no text"
    elif depth > MAX_DEPTH:
        yield f"lists and mappings in more than {MAX_DEPTH} others"
    elif isinstance(value, (dict, Mapping)):
        for name, part in value.items():
            if not isinstance(name, str):
                yield f"a key {shown(name)} that is no text"
            else:
                yield from _plain(name, counts)
            yield from _plain(part, counts, depth + 1, is_image or name == "image")
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _plain(part, counts, depth + 1, is_image)
    elif isinstance(value, float) and not abs(value) <= LARGEST:
        yield f"{value}, a finite number is needed"
    elif not isinstance(value, int | float | None) and not (
        is_image and (isinstance(value, bytes) or hasattr(value, "getbands"))
    ):
        yield f"a {type(value).__name__}: texts, numbers, lists and mappings are taken, pictures under 'image'"
