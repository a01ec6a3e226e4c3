"""Responses in OpenAI's format: one object, or the chunks of a stream that add up to it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.chat.chat import Chat
from rollout.gateway.chat_request import ChatRequest, RequestError
from rollout.gateway.sampling_choice import Choice, log_prob_entries


@dataclass(frozen=True)
class CompletionHeader:
    """Fields that every object of a response has."""

    id: str
    created: int
    model: str

    def object(self, kind: str) -> dict[str, Any]:
        """Return the object without its contents."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choice: dict[str, Any], prompt_ids: Sequence[int] | None = None) -> dict[str, Any]:
        """Return a `chat.completion.chunk` with a piece of one choice; `prompt_ids` if the client wants token ids."""
        chunk = self.object("chat.completion.chunk") | {"choices": [choice]}
        return chunk if prompt_ids is None else chunk | {"prompt_token_ids": list(prompt_ids)}


@dataclass(frozen=True)
class Answer:
    """The response to a request, ready to be sent."""

    head: CompletionHeader
    prompt_ids: Sequence[int]
    choices: tuple[Choice, ...]

    def body(self, request: ChatRequest, chat: Chat) -> dict[str, Any]:
        """Return the `chat.completion` object."""
        choices = []
        for choice in self.choices:
            entry = {"index": choice.index, "message": choice.message, "finish_reason": choice.finish_reason}
            sampled = choice.completion
            entries = log_prob_entries(chat, sampled.ids, sampled.log_probs) if request.log_probs else None
            entry["logprobs"] = None if entries is None else {"content": entries, "refusal": None}
            if request.token_ids:
                entry["token_ids"] = list(sampled.ids)
            choices.append(entry)
        body = self.head.object("chat.completion") | {"choices": choices, "usage": self.usage()}
        return body | {"prompt_token_ids": list(self.prompt_ids)} if request.token_ids else body

    def usage(self) -> dict[str, int]:
        """Count the tokens of the prompt and of all completions, stop tokens included."""
        prompt, sampled = len(self.prompt_ids), sum(len(choice.completion.ids) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream, with its usage."""
        return self.head.object("chat.completion.chunk") | {"choices": [], "usage": self.usage()}


class Wire(Protocol):
    """The form in which a client gets an answer."""

    def chunk(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """Return the events of a piece of a choice."""
        ...

    def end(self, answer: Answer) -> list[bytes]:
        """Return the last events of a stream."""
        ...

    def refusal(self, error: RequestError) -> bytes:
        """Return the event of an error in a stream."""
        ...

    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the whole answer as one object."""
        ...


class ChatWire:
    """Chat completions."""

    def __init__(self, request: ChatRequest, chat: Chat) -> None:
        self._request, self._chat = request, chat

    def chunk(self, chunk: Mapping[str, Any]) -> list[bytes]:
        """Return the chunk."""
        return [event(chunk)]

    def end(self, answer: Answer) -> list[bytes]:
        """Return the usage, if it was asked for, and the end."""
        return [*([event(answer.usage_chunk())] if self._request.usage else []), DONE]

    def refusal(self, error: RequestError) -> bytes:
        """Return the error."""
        return event(error.body())

    def body(self, answer: Answer) -> dict[str, Any]:
        """Return the `chat.completion` object."""
        return answer.body(self._request, self._chat)


def event(chunk: Mapping[str, Any]) -> bytes:
    """Return the bytes of one server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
