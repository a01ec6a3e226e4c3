"""Turns that a text ends: engines stop at tokens, so the text is looked for here, while the tokens come."""

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout.chat.turn_detokenizer import TurnDetokenizer
from rollout.engine import Completion, RolloutEngine, Sampling


async def generate_until(
    engine: RolloutEngine,
    decode: Callable[[Sequence[int]], str],
    prompt_ids: Sequence[int],
    sampling: Sampling,
    media: Mapping[str, Any] | None = None,
    *,
    deadline: float | None = None,
) -> tuple[Completion, bool]:
    """Sample a completion that ends with the first token that completes one of `sampling.stop`.

    Returns the completion and whether a text ended it; its stop_reason is "stop" then. What the engine sampled after
    that token, until it heard of it, is dropped. `decode` gives the text of ids, special tokens included.
    """
    text = TurnDetokenizer(decode, sampling.stop, sampling.stop_token_ids)
    request, ending = uuid.uuid4().hex, list[asyncio.Task[bool]]()

    def read(ids: Sequence[int], log_probs: Sequence[float]) -> None:
        del log_probs
        text.feed(ids)
        if text.kept is not None and not ending:
            ending.append(asyncio.ensure_future(engine.cancel(request)))

    plain = replace(sampling, stop=())
    try:
        done = await engine.generate(prompt_ids, plain, media, request_id=request, deadline=deadline, on_tokens=read)
    finally:
        await asyncio.gather(*ending)
    text.feed(done.ids[len(text.ids) :])
    if text.kept is None:
        return done, False
    kept = slice(text.kept)
    cut = (done.ids[kept], done.log_probs[kept], done.policy_versions[kept])
    return replace(done, ids=cut[0], log_probs=cut[1], policy_versions=cut[2], stop_reason="stop"), True
