"""A system prompt before the first messages of any environment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout import EpisodeContext, Observation
from rollout.chat.messages import Message


def with_system_prompt(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """Return the messages after the system prompt; their own system prompt follows it after a blank line."""
    first = messages[0] if messages else {}
    if first.get("role") == "system" and isinstance(first.get("content"), str):
        return ({**first, "content": f"{text}\n\n{first['content']}"}, *messages[1:])
    return ({"role": "system", "content": text}, *messages)


@dataclass(frozen=True)
class SystemPrompt:
    """A wrapper of environment factories: each environment opens with the system prompt `text`."""

    text: str

    def __call__(self, factory: Callable[[], Any]) -> "WithSystemPrompt":
        """Return a factory whose environments open with the prompt."""
        return WithSystemPrompt(factory, self.text)


class WithSystemPrompt:
    """A factory whose environments open with a system prompt; the rest is the wrapped factory's."""

    def __init__(self, factory: Callable[[], Any], text: str) -> None:
        self._factory, self._text = factory, text
        self.__qualname__ = getattr(factory, "__qualname__", type(factory).__qualname__)
        for name in ("score_group", "instant", "timeout"):
            if hasattr(factory, name):
                setattr(self, name, getattr(factory, name))
        if hasattr(factory, "run_group"):
            raise ValueError(
                f"--system-prompt can't reach {self.__qualname__}, an agent that writes its own messages: leave it out"
            )

    def __call__(self) -> Any:
        """Return an environment of one episode."""
        environment = self._factory()
        opened = environment.open

        async def open_(context: EpisodeContext) -> Observation:
            opening = await opened(context)
            result: Observation = replace(opening, messages=with_system_prompt(opening.messages, self._text))
            return result

        environment.open = open_
        return environment
