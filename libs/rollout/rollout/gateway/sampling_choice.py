"""One choice of a response: parsed from its tokens while they come, then as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from chat_tools.parsing.formats import find_format
from rollout.chat.chat import Chat
from rollout.chat.messages import Message
from rollout.chat.turn_detokenizer import TurnDetokenizer, min_tokens_with
from rollout.engine import Completion
from rollout.gateway.chat_request import ChatRequest, read_message
from rollout.gateway.forced_call import openings
from rollout.gateway.turn_message import Delta, TurnMessage


@dataclass(frozen=True)
class Choice:
    """One of a response's choices: `message` is as the API has it, `recorded` as a client will send it back.

    `completion` holds the tokens that are recorded: where a stop text ended it, up to the one that completes the text.
    """

    index: int
    completion: Completion
    message: dict[str, Any]
    recorded: Message
    finish_reason: str


class ChoiceReader:
    """Parser of a choice's tokens into the pieces of a stream, as they are sampled.

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
        self._text = TurnDetokenizer(chat.decode, request.stop, stop_ids)
        schemas = [tool.schema for tool in request.tools]
        self._message = TurnMessage(chat.tool_format, schemas, prefill, may_call=request.may_call, number=number)
        self._log_probs: list[float] = []
        self._called: int | None = None  # tokens up to the first call's end, where a turn may hold one alone
        self._told = 0  # tokens that the stream has sent in full
        self._begun = False

    @property
    def stopped(self) -> bool:
        """Whether a stop text (or a call too many) is complete, so that further tokens are not needed."""
        return self._text.kept is not None

    def feed(self, ids: Sequence[int], log_probs: Sequence[float]) -> list[dict[str, Any]]:
        """Append tokens and return the stream's choices that they complete."""
        self._log_probs += log_probs
        if self._request.parallel_calls:
            return self._pieces(self._message.feed(self._text.feed(ids)))
        return self._pieces(
            [delta for i in ids for delta in self._first_call(self._message.feed(self._text.feed([i])))]
        )

    def _first_call(self, deltas: Sequence[Delta]) -> list[Delta]:
        """Return the deltas without a second call; that one ends the turn where the first one ended."""
        kept = []
        for delta in deltas:
            if "tool_calls" not in delta or self._called is None:
                kept.append(delta)
                self._called = len(self._text.ids) if "tool_calls" in delta else self._called
            elif self._text.kept is None:
                fmt, rest = find_format(self._chat.tool_format), self._text.ids[self._called :]
                text = self._chat.decode(rest)
                for opening in openings(fmt):
                    text = text.partition(opening)[0]
                marks = [
                    mark for _, mark in (*fmt.calls, *([fmt.section] if fmt.section else [])) if mark and mark in text
                ]
                self._text.kept = self._called + (min_tokens_with(self._chat.decode, rest, marks) if marks else 0)
        return kept

    def finish(self, completion: Completion) -> tuple[Choice, list[dict[str, Any]]]:
        """Append the rest of the engine's completion; return the choice and the last pieces of its stream.

        What could not be read as a call stays in the content as the model wrote it. Raises RuntimeError where the
        engine streamed other tokens before.
        """
        known = len(self._text.ids)
        if tuple(self._text.ids) != completion.ids[:known]:
            raise RuntimeError("the engine gave other tokens in the end than it told while it sampled")
        pieces = self.feed(completion.ids[known:], completion.log_probs[known:])
        deltas = self._message.feed(self._text.finish()) + self._message.finish()
        if not self._request.parallel_calls:
            deltas = self._first_call(deltas)
        finished = completion.stop_reason == "stop" or self.stopped
        if (count := self._text.kept) is not None:
            completion = replace(
                completion,
                ids=completion.ids[:count],
                log_probs=completion.log_probs[:count],
                policy_versions=completion.policy_versions[:count],
                stop_reason="length",  # no stop token ended it
            )
        pieces += self._pieces(deltas)
        message = self._message.message()
        if not self._request.parallel_calls and "tool_calls" in message:
            message["tool_calls"] = message["tool_calls"][:1]
        called = "tool_calls" in message and self._request.function is None  # OpenAI's word for a named one is "stop"
        reason = "length" if not finished else "tool_calls" if called else "stop"
        choice = Choice(self._index, completion, message, read_message(message, "answer", {}), reason)
        return choice, [*pieces, self._piece({}, len(completion.ids), reason)]

    def _pieces(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the stream's pieces of deltas; the first one has the log-probs of all tokens since the last piece."""
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


def log_prob_entries(chat: Chat, ids: Sequence[int], log_probs: Sequence[float]) -> list[dict[str, Any]]:
    """Return an entry for each sampled token, the stop token included; one that is no whole character has no bytes."""
    entries = []
    for token, log_prob in zip(ids, log_probs, strict=True):
        text = chat.decode([token])
        whole = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "logprob": log_prob, "bytes": whole, "top_logprobs": []})
    return entries
