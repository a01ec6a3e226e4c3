"""One answer to a request: read from its tokens while they come, then whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.chat.chat import Chat
from rollout.chat.messages import Message
from rollout.engine import Completion
from rollout.gateway.chat_request import ChatRequest, read_message
from rollout.gateway.turn_detokenizer import TurnDetokenizer
from rollout.gateway.turn_message import Delta, TurnMessage


@dataclass(frozen=True)
class Choice:
    """One of a request's answers: `message` is as the API has it, `recorded` as a client will send it back.

    `completion` holds the tokens that are recorded: where a stop text ended the answer, up to the one that completes
    it.
    """

    index: int
    completion: Completion
    message: dict[str, Any]
    recorded: Message
    finish_reason: str


class ChoiceReader:
    """Reads a choice's tokens as they are sampled, in the pieces of a stream.

    `prefill`: what the prompt holds of the turn. `stop_ids` end it. `number` numbers calls that bring no id.
    """

    def __init__(
        self,
        chat: Chat,
        request: ChatRequest,
        index: int,
        *,
        prefill: str,
        stop_ids: Sequence[int],
        number: Callable[[], int],
    ) -> None:
        self._chat, self._request, self._index = chat, request, index
        self._text = TurnDetokenizer(lambda ids: decode(chat, ids), request.stop, stop_ids)
        schemas = [tool.schema for tool in request.tools]
        self._message = TurnMessage(chat.tool_format, schemas, prefill, may_call=request.may_call, number=number)
        self._log_probs: list[float] = []
        self._told = 0  # tokens of which a stream has said everything
        self._begun = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text is complete: what is sampled now is sampled in vain."""
        return self._text.kept is not None

    def feed(self, ids: Sequence[int], log_probs: Sequence[float]) -> list[dict[str, Any]]:
        """Take tokens, and return the choices of a stream's chunks that they make."""
        self._log_probs += log_probs
        return self._pieces(self._message.feed(self._text.feed(ids)))

    def finish(self, completion: Completion) -> tuple[Choice, list[dict[str, Any]]]:
        """Take what the engine gave in the end: the choice, and the last pieces of its stream.

        What could not be read as a call stays in the content as the model wrote it. RuntimeError where the engine told
        other tokens on the way.
        """
        known = len(self._text.ids)
        if tuple(self._text.ids) != completion.ids[:known]:
            raise RuntimeError("the engine gave other tokens in the end than it told while it sampled")
        pieces = self.feed(completion.ids[known:], completion.log_probs[known:])
        deltas = self._message.feed(self._text.finish()) + self._message.finish()
        finished = completion.stop_reason == "stop" or self.stopped
        if (kept := self._text.kept) is not None:
            completion = replace(
                completion,
                ids=completion.ids[:kept],
                log_probs=completion.log_probs[:kept],
                policy_versions=completion.policy_versions[:kept],
                stop_reason="length",  # no stop token ended it
            )
        pieces += self._pieces(deltas)
        message = self._message.message()
        called = "tool_calls" in message and self._request.function is None  # OpenAI's word for a named one is "stop"
        reason = "length" if not finished else "tool_calls" if called else "stop"
        choice = Choice(self._index, completion, message, read_message(message, "answer", {}), reason)
        return choice, [*pieces, self._piece({}, len(completion.ids), reason)]

    def _pieces(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Deltas for a stream; the first of them has all that is known of the tokens since the last."""
        if not deltas:
            return []
        begins = [] if self._begun else [{"role": "assistant", "content": ""}]
        self._begun = True
        known = len(self._text.ids) if self._text.kept is None else self._text.kept
        return [self._piece(delta, known) for delta in (*begins, *deltas)]

    def _piece(self, delta: Delta, known: int, reason: str | None = None) -> dict[str, Any]:
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": "", **delta}
        new = slice(self._told, known)
        self._told = max(self._told, known)
        ids, log_probs = self._text.ids[new], self._log_probs[new]
        piece: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": reason, "logprobs": None}
        if self._request.log_probs and ids:
            piece["logprobs"] = {"content": log_prob_entries(self._chat, ids, log_probs), "refusal": None}
        if self._request.token_ids:
            piece["token_ids"] = ids
        return piece


def decode(chat: Chat, ids: Sequence[int]) -> str:
    """Return the ids' text, special tokens included."""
    return str(chat.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def log_prob_entries(chat: Chat, ids: Sequence[int], log_probs: Sequence[float]) -> list[dict[str, Any]]:
    """Return one entry a sampled token, its stop token included. A token that is no whole character has no bytes."""
    entries = []
    for token, log_prob in zip(ids, log_probs, strict=True):
        text = decode(chat, [token])
        whole = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "logprob": log_prob, "bytes": whole, "top_logprobs": []})
    return entries
