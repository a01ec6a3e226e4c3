"""Episodes: the model speaks, the environment answers, until one of them is done."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollout.chat import Chat
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.environment import Environment, Message, Reply
from rollout.trajectory import NOT_SAMPLED, Trajectory


@dataclass
class _Transcript:
    """The token streams of a running episode."""

    ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)

    def given(self, ids: list[int]) -> None:
        """Tokens that nobody sampled."""
        self.ids += ids
        self.loss_mask += [False] * len(ids)
        self.log_probs += [0.0] * len(ids)
        self.policy_versions += [NOT_SAMPLED] * len(ids)

    def sampled(self, completion: Completion) -> None:
        """Tokens of one turn, exactly as the engine made them."""
        self.ids += completion.ids
        self.loss_mask += [True] * len(completion.ids)
        self.log_probs += completion.log_probs
        self.policy_versions += completion.policy_versions

    def trajectory(
        self, reward: float, group: int, messages: Sequence[Message], metadata: Mapping[str, Any]
    ) -> Trajectory:
        """The streams as they are now, with what is known of the whole episode."""
        streams = (tuple(self.ids), tuple(self.loss_mask), tuple(self.log_probs), tuple(self.policy_versions))
        return Trajectory(*streams, reward=reward, group=group, messages=tuple(messages), metadata=metadata)


async def run_episode(
    env: Environment,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    *,
    max_turns: int = 8,
    max_tokens: int | None = None,
    group: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Play one episode of `env` and return its trajectory; the rewards of its turns are summed.

    Sampling stops at the chat's end-of-turn token besides `sampling.stop_token_ids`. `max_tokens` bounds prompt and all
    turns together: a turn gets at most what is left, and the episode ends when nothing is. A turn cut off by a limit is
    shown to the environment with `finished=False` and ends the episode. `metadata["end"]` says how it ended: "done",
    "length", "max_turns", "max_tokens" or "abort".
    """
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, got {max_turns}")
    session = env.start()
    messages: list[Message] = list(session.messages)
    notes: dict[str, Any] = dict(metadata or {})
    transcript = _Transcript()
    transcript.given(chat.open(messages, session.tools))
    if max_tokens is not None and len(transcript.ids) >= max_tokens:
        raise ValueError(f"the prompt has {len(transcript.ids)} tokens, which leaves none of max_tokens={max_tokens}")
    reward, end = 0.0, "max_turns"
    for turn in range(max_turns):
        completion = await engine.generate(
            list(transcript.ids), _turn_sampling(sampling, chat, turn, max_tokens, transcript)
        )
        transcript.sampled(completion)
        reply = chat.read(completion.ids, completion.stop_reason == "stop", session.tools)
        messages.append(_assistant_message(reply))
        outcome = await session.step(reply)
        reward += outcome.reward
        notes.update(outcome.metadata)
        if completion.stop_reason == "abort" or not reply.finished:
            end = "abort" if completion.stop_reason == "abort" else "length"
            break
        if outcome.done:
            end = "done"
            break
        if turn + 1 < max_turns:
            following = chat.after_turn(outcome.messages)
            if (
                transcript.ids[-1] != chat.end_of_turn_id
            ):  # another stop token ended the turn: close it for the template
                following = [chat.end_of_turn_id, *following]
            if max_tokens is not None and len(transcript.ids) + len(following) >= max_tokens:
                end = "max_tokens"
                break
            transcript.given(following)
            messages.extend(outcome.messages)
    notes.update(end=end, turns=turn + 1)
    return transcript.trajectory(reward, group, messages, notes)


async def run_group(
    env: Environment,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    *,
    size: int,
    group: int = 0,
    max_turns: int = 8,
    max_tokens: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> list[Trajectory]:
    """Play `size` episodes of one environment at once. A seed in `sampling` gives each episode a seed of its own."""
    if size < 1:
        raise ValueError(f"a group has at least 1 episode, got {size}")
    episodes = [
        run_episode(
            env,
            engine,
            chat,
            sampling if sampling.seed is None else replace(sampling, seed=derive_seed(sampling.seed, "episode", i)),
            max_turns=max_turns,
            max_tokens=max_tokens,
            group=group,
            metadata=metadata,
        )
        for i in range(size)
    ]
    return list(await asyncio.gather(*episodes))


def derive_seed(seed: int, *path: int | str) -> int:
    """A 63-bit seed for one branch of a run, the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _turn_sampling(
    sampling: Sampling, chat: Chat, turn: int, max_tokens: int | None, transcript: _Transcript
) -> Sampling:
    stops = tuple(dict.fromkeys((*sampling.stop_token_ids, chat.end_of_turn_id)))
    limit = sampling.max_new_tokens
    if max_tokens is not None:
        limit = min(limit, max_tokens - len(transcript.ids))
    seed = None if sampling.seed is None else derive_seed(sampling.seed, "turn", turn)
    return replace(sampling, stop_token_ids=stops, max_new_tokens=limit, seed=seed)


def _assistant_message(reply: Reply) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": reply.content}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        message["tool_calls"] = [
            {"type": "function", "function": {"name": c.name, "arguments": json.loads(c.arguments)}}
            for c in reply.tool_calls
        ]
    return message
