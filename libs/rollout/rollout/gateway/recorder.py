"""The record of a gateway's session: the exact tokens of its conversations.

Strategy
1. A conversation is a stream of prompt tokens and sampled tokens, in order. After each sampled turn it has a mark: the
   key of the messages so far (with the response as the client got it) and the number of their tokens.
2. A request whose messages begin with a marked conversation and continue with messages of others extends it: the new
   messages alone are tokenised, and appended to the recorded tokens.
3. At the end of a stream that no other request is extending, the stream itself is extended. Elsewhere (a branch, a
   retry, two requests at once) a new stream begins with the recorded tokens, which are not trained there.
4. A request for several choices has them all sampled after the same tokens. The first extends the stream, each other
   begins one as a branch does: every choice was the policy's, and what an agent makes of them (the best, a vote)
   depends on all. A request may continue from any of them.
5. Any other request begins a new stream with its whole conversation: another system prompt, other tools, a compacted
   history, a sub-agent.

Invariants (tests): a sampled token is trained in exactly one stream, with the log-prob and version that it was sampled
with; a turn without a response leaves no record; ids before a mark never change.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.chat.chat import Chat
from rollout.chat.images import images_of
from rollout.chat.messages import Message
from rollout.chat.outline import Outline
from rollout.chat.segment import Segment, Stream
from rollout.engine import Completion
from rollout.gateway.chat_request import ChatRequest, tools_key
from rollout.tools.tool import Tool
from rollout.tools.tool_stats import ToolStats


@dataclass(frozen=True)
class Mark:
    """The end of a sampled turn: the first `tokens` tokens of `stream`, which are these messages.

    `stop` is the token that ended the turn, None where a limit or a stop text did. `outline` is that of the first
    messages, and is not changed.
    """

    stream: Stream
    tokens: int
    messages: tuple[Message, ...]
    stop: int | None
    outline: Outline | None = None


@dataclass
class Turn:
    """A running request: its prompt, and the stream that will record its completion.

    `given` are the last tokens of the prompt: the beginning of the completion, where it was given.
    """

    prompt_ids: list[int]
    given: Sequence[int]
    messages: tuple[Message, ...]
    stream: Stream
    key: bytes  # of the conversation up to the completion
    number: int  # of this session's requests
    tools: tuple[Tool, ...] = ()
    outline: Outline | None = None  # of the first messages


@dataclass
class Recorder:
    """The streams of one session and the marks in them."""

    chat: Chat
    streams: list[Stream] = field(default_factory=list)
    messages: tuple[Message, ...] = ()  # the longest conversation, for people
    requests: int = 0
    turns: int = 0
    calls: int = 0
    tally: ToolStats = field(default_factory=ToolStats)
    marks: dict[bytes, Mark] = field(default_factory=dict, repr=False)
    busy: set[int] = field(default_factory=set, repr=False)  # ids of streams that a running turn will extend

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The streams with a sampled token, as they are now, in the order in which they began."""
        return tuple(segment for segment in (stream.segment() for stream in self.streams) if segment.sampled)

    def number_call(self) -> int:
        """Return the number of the session's next call."""
        self.calls += 1
        return self.calls - 1

    def begin(self, request: ChatRequest, given: Sequence[int] = ()) -> Turn:
        """Find or begin the stream of a request whose completion begins with `given`.

        The turn must be ended by `commit` or `abandon`. Raises ValueError for messages that the chat template refuses.
        """
        keys = conversation_keys(request)
        last = max((i for i, m in enumerate(request.messages) if m["role"] == "assistant"), default=-1)
        mark = self.marks.get(keys[last]) if last >= 0 else None
        messages, stream = request.messages, None
        prompt, outline = None, self.chat.outline()
        if mark is not None:
            outline = mark.outline and mark.outline.copy()
            messages = (*mark.messages, *request.messages[last + 1 :])
            prompt = self._extended(mark, request.messages[last + 1 :], request.tools, outline)
            if prompt is not None:
                is_end = mark.tokens == len(mark.stream.ids) and id(mark.stream) not in self.busy
                stream = mark.stream if is_end else Stream(media=mark.stream.media)
        if prompt is None or stream is None:
            opened = self.chat.opening(messages, request.tools)
            prompt, stream = opened.ids, Stream(media=opened.media)
        self.busy.add(id(stream))
        self.tally.count_results(request.messages[last + 1 :])
        turn = Turn([*prompt, *given], given, messages, stream, keys[-1], self.requests, request.tools, outline)
        self.requests += 1
        return turn

    def _extended(
        self, mark: Mark, messages: Sequence[Message], tools: Sequence[Tool], outline: Outline | None
    ) -> list[int] | None:
        """Return the recorded tokens and those of new messages; None where the template would rewrite the former, and
        for new images, with which a stream begins."""
        if images_of(messages):
            return None
        following = self.chat.follow(mark.messages, messages, tools, mark.stop, outline)
        return None if following is None else [*mark.stream.ids[: mark.tokens], *following]

    def commit(self, turn: Turn, choices: Sequence[tuple[Completion, Message]]) -> None:
        """Record a turn: its prompt, and of each choice the sampled tokens and the message that the client gets."""
        for index, (completion, answer) in enumerate(choices):
            stream = turn.stream if index == 0 else Stream(media=turn.stream.media)
            if not stream.ids:
                self.streams.append(stream)
            stream.given(turn.prompt_ids[len(stream.ids) :])
            stream.sampled(completion)
            stop = completion.ids[-1] if completion.stop_reason == "stop" else None
            mark = Mark(stream, len(stream.ids), (*turn.messages, answer), stop, turn.outline)
            self.marks[next_key(turn.key, answer)] = mark
            if len(mark.messages) > len(self.messages):
                self.messages = mark.messages
            self.turns += 1
            made = ((call["function"]["name"], call.get("id", "")) for call in answer.get("tool_calls", ()))
            self.tally.count_calls(made, (tool.name for tool in turn.tools))

    def abandon(self, turn: Turn) -> None:
        """Release a turn's stream; where the turn was not committed, the session is as it was before."""
        self.busy.discard(id(turn.stream))


def conversation_keys(request: ChatRequest) -> list[bytes]:
    """Return a key for each message, made from the tools and all messages up to it."""
    key = hashlib.blake2b(tools_key(request.tools).encode(), digest_size=16).digest()
    keys = []
    for message in request.messages:
        key = next_key(key, message)
        keys.append(key)
    return keys


def next_key(key: bytes, message: Message) -> bytes:
    """Return the key of a conversation with one more message.

    An assistant's reasoning is left out: clients drop it, and it is in the recorded tokens either way.
    """
    seen = {name: value for name, value in message.items() if name != "reasoning_content"}
    return hashlib.blake2b(key + json.dumps(seen, sort_keys=True).encode(), digest_size=16).digest()
