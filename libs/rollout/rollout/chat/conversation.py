"""One agent's conversation with the policy, token in, token out; a part of an episode.

Strategy
1. A stream holds the exact tokens that the model read and sampled. Sampled tokens are never tokenised again.
2. Messages of others are appended to the stream, where the chat template leaves the earlier text as it was
   (`Chat.follow`).
3. Where the template rewrites earlier turns (thinking that is stripped once a user speaks), or the context is replaced
   (compaction), a new stream begins with the whole conversation as the template writes it now.

Invariant: every sampled token is trained once, in the stream in which it was sampled, after the very tokens that the
model saw; in later streams the same words are prompt tokens, and masked.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollout.chat.chat import Chat
from rollout.chat.images import RenderedPrompt
from rollout.chat.messages import Message, Reply
from rollout.chat.segment import Segment, Stream
from rollout.chat.stop_texts import generate_until
from rollout.chat.token_budget import TokenBudget
from rollout.engine import Completion, RolloutEngine, Sampling, StopReason
from rollout.seeds import derive_seed
from rollout.tools.tool import Tool
from seqpack.renamed import renamed


class TokensSpentError(RuntimeError):
    """The budget of sampled tokens is spent: no conversation of the episode gets another turn."""


class Conversation:
    """Messages so far, and the token streams in which they were played.

    `max_tokens` bounds each stream, prompt and turns together; `budget` bounds what is sampled in all streams of all
    conversations that share it (None: `max_tokens` of this conversation's own). At `deadline` (seconds of
    `time.monotonic()`) a running turn returns with the tokens that it has. `seed`, or else the one in `sampling`, gives
    every turn a seed of its own. Raises ValueError for first messages that leave no token of `max_tokens`, or that the
    template refuses.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        chat: Chat,
        sampling: Sampling,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        agent: str = "",
        seed: int | None = None,
        max_tokens: int | None = None,
        budget: TokenBudget | None = None,
        deadline: float | None = None,
    ) -> None:
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._seed = sampling.seed if seed is None else seed
        self._stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *chat.stop_ids)))
        self._max_tokens = max_tokens
        self._budget = budget or TokenBudget(max_tokens)
        self._deadline = deadline
        self._streams: list[Stream] = []
        self.agent = agent
        self.messages: list[Message] = list(messages)
        self.tools = tuple(tools)
        self.turns = 0
        self.calls = 0
        self.stop_reason: StopReason | None = None
        self._stopped_by_text = False
        if sampling.structured_outputs and (why := chat.structured_problem()):
            raise ValueError(why)
        self._outline = chat.outline()
        opened = chat.opening(messages, tools)
        if not self._fits(len(opened.ids)):
            raise ValueError(f"the prompt has {len(opened.ids)} tokens, which leaves none of max_tokens={max_tokens}")
        self._begin(opened)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The streams with a sampled token; the first stream where no token was sampled."""
        made = [stream.segment() for stream in self._streams]
        return tuple(s for s in made if s.sampled) or (made[0],)

    @property
    def max_new_tokens(self) -> int:
        """Most tokens of a turn, as long as the budget and the stream allow them."""
        return self._sampling.max_new_tokens

    @property
    def limit(self) -> int:
        """Most tokens of the next turn, by all limits."""
        return self._budget.up_to(self._room)

    @property
    def _room(self) -> int:
        left = None if self._max_tokens is None else self._max_tokens - len(self._streams[-1].ids)
        return self._sampling.max_new_tokens if left is None else min(left, self._sampling.max_new_tokens)

    async def reply(self) -> Reply:
        """Sample one turn; `stop_reason` says how it ended. Raise TokensSpentError where the budget is spent."""
        granted = await self._budget.take(self._room)
        used = 0
        try:
            if granted < 1:
                raise TokensSpentError(f"all {self._budget.total} tokens that the episode may sample are sampled")
            completion = await self._sample(granted)
            used = len(completion.ids)
        finally:
            self._budget.settle(granted, used)
        self._streams[-1].sampled(completion)
        self.turns += 1
        self.stop_reason = completion.stop_reason
        finished = completion.stop_reason == "stop" and not self._stopped_by_text
        reply = self._chat.read(completion.ids, finished, self.tools, calls_before=self.calls)
        reply = replace(reply, finished=True) if self._stopped_by_text else reply
        self.calls += len(reply.tool_calls)
        self.messages.append(_assistant_message(reply))
        return reply

    async def _sample(self, limit: int) -> Completion:
        sampling = replace(
            self._sampling,
            max_new_tokens=limit,
            stop_token_ids=self._stops,
            seed=None if self._seed is None else derive_seed(self._seed, "turn", self.turns),
        )
        stream = self._streams[-1]
        ids, deadline = list(stream.ids), self._deadline
        if not sampling.stop:
            return await self._engine.generate(ids, sampling, stream.media, deadline=deadline)
        completion, self._stopped_by_text = await generate_until(
            self._engine, self._chat.decode, ids, sampling, stream.media, deadline=deadline
        )
        return completion

    def add_messages(self, messages: Sequence[Message]) -> bool:
        """Add the messages of others after a turn. Return False, and add nothing, where `max_tokens` leaves no token.

        Raises ValueError for messages that the template refuses.
        """
        stream = self._streams[-1]
        stop = stream.ids[-1] if self.stop_reason == "stop" and not self._stopped_by_text else None
        following = self._chat.follow(self.messages, messages, self.tools, stop, self._outline)
        if following is None:
            return self.go_on_from([*self.messages, *messages])
        if not self._fits(len(stream.ids) + len(following)):
            return False
        stream.given(following)
        self.messages.extend(messages)
        return True

    say = renamed("add_messages")

    def go_on_from(self, messages: Sequence[Message]) -> bool:
        """Start a new stream from these messages, in place of the old ones. Return False where they are too long."""
        opened = self._chat.opening(messages, self.tools)
        if not self._fits(len(opened.ids)):
            return False
        self._begin(opened)
        self.messages = list(messages)
        self._outline = self._chat.outline()
        return True

    def fork(self, agent: str) -> "Conversation":
        """Return a branch: a conversation with the same tokens so far, which are trained in this one alone."""
        branch = type(self).__new__(type(self))
        branch.__dict__ |= self.__dict__
        branch.agent = agent
        branch.messages = list(self.messages)
        branch._outline = None if self._outline is None else self._outline.copy()
        branch._streams = []
        branch._begin(RenderedPrompt(self._streams[-1].ids, self._streams[-1].media))
        if self._seed is not None:
            branch._seed = derive_seed(self._seed, "fork", agent)
        return branch

    def _begin(self, opened: RenderedPrompt) -> None:
        self._streams.append(Stream(self.agent, opened.media))
        self._streams[-1].given(opened.ids)

    def _fits(self, tokens: int) -> bool:
        return self._max_tokens is None or tokens < self._max_tokens


def _assistant_message(reply: Reply) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "id": c.id, "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in reply.tool_calls
        ]
    return message
