"""A request's answer as OpenAI's API has it: one object, or the chunks of a stream that add up to it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.chat.chat import Chat
from rollout.gateway.chat_request import ChatRequest
from rollout.gateway.sampling_choice import Choice, log_prob_entries


@dataclass(frozen=True)
class CompletionHeader:
    """What every object of an answer says of itself."""

    id: str
    created: int
    model: str

    def object(self, kind: str) -> dict[str, Any]:
        """Return the object without its contents."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def chunk(self, choice: dict[str, Any], prompt_ids: Sequence[int] | None = None) -> dict[str, Any]:
        """Return a `chat.completion.chunk` with a piece of one choice; `prompt_ids` for a client that asked for token
        ids."""
        chunk = self.object("chat.completion.chunk") | {"choices": [choice]}
        return chunk if prompt_ids is None else chunk | {"prompt_token_ids": list(prompt_ids)}


@dataclass(frozen=True)
class Answer:
    """What a request is answered with, ready to be sent."""

    head: CompletionHeader
    prompt_ids: Sequence[int]
    choices: tuple[Choice, ...]

    def body(self, request: ChatRequest, chat: Chat) -> dict[str, Any]:
        """Return the `chat.completion` object."""
        choices = []
        for choice in self.choices:
            given = {"index": choice.index, "message": choice.message, "finish_reason": choice.finish_reason}
            sampled = choice.completion
            entries = log_prob_entries(chat, sampled.ids, sampled.log_probs) if request.log_probs else None
            given["logprobs"] = None if entries is None else {"content": entries, "refusal": None}
            if request.token_ids:
                given["token_ids"] = list(sampled.ids)
            choices.append(given)
        body = self.head.object("chat.completion") | {"choices": choices, "usage": self.usage()}
        return body | {"prompt_token_ids": list(self.prompt_ids)} if request.token_ids else body

    def usage(self) -> dict[str, int]:
        """Return tokens of the prompt and of all answers, stop tokens included."""
        given, sampled = len(self.prompt_ids), sum(len(choice.completion.ids) for choice in self.choices)
        return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream that was asked to say what it used."""
        return self.head.object("chat.completion.chunk") | {"choices": [], "usage": self.usage()}


def event(chunk: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
