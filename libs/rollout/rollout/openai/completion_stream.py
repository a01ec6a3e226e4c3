"""Completion requests and their streams: the body of a request, and the checks of a response.

A server must return what training needs: ids and log-probs of every token, one each, and an end that was asked for.
"""

import json
import math
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple

from rollout.engine import Sampling, StopReason

IDENTITY_VALUES: Mapping[str, Any] = {
    "n": 1,
    "ignore_eos": True,
}
"""Fields of every request, so that a server's own defaults (of a model's generation_config.json) have no effect."""
_DONE = "[DONE]"


class WireError(RuntimeError):
    """An invalid response of the server."""


class CompletionChunk(NamedTuple):
    """The tokens of one event of a stream; `reason` where it is the last."""

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    reason: StopReason | None


def request_body(model: str, prompt_ids: Sequence[int], sampling: Sampling) -> dict[str, Any]:
    """Return the body of a streamed request for one completion of these ids."""
    body = {
        "model": model,
        "prompt": list(prompt_ids),
        "stream": True,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # the only names that a server without a tokenizer has
        "max_tokens": sampling.max_new_tokens,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "stop_token_ids": list(sampling.stop_token_ids),
        **IDENTITY_VALUES,
    }
    return body if sampling.seed is None else body | {"seed": sampling.seed}


async def parts(lines: AsyncIterator[str]) -> AsyncGenerator[CompletionChunk]:
    """Yield the parts of a stream of server-sent events, to the one that ends it.

    Raises:
        ValueError, WireError: an event that is no part of a response (`read_chunk`), or a stream without an end.
    """
    async for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == _DONE:
            break
        part = read_chunk(_object(data))
        if part is not None:
            yield part
        if part is not None and part.reason is not None:
            return
    raise WireError("the server ended its stream before the answer was whole")


def read_chunk(event: Mapping[str, Any]) -> CompletionChunk | None:
    """Return the part that an event brings; None where it holds something else (usage).

    Raises:
        ValueError: the server refuses the request.
        WireError: it is another error, lacks ids or log-probs, or has not one of each for every token.
    """
    if "error" in event:
        code = event["error"].get("code") if isinstance(event["error"], dict) else None
        if code in range(400, 500):  # vLLM begins its response before it checks the request
            raise ValueError(f"the server refuses a request ({code}): {error_text(event)}")
        raise WireError(f"the server broke off: {error_text(event)}")
    choices = event.get("choices")
    if not choices:
        return None
    (choice,) = choices
    ids, entries = choice.get("token_ids"), choice.get("logprobs")
    if ids is None and not entries and not choice.get("text"):
        ids = []  # the end without a token
    if ids is None:
        raise WireError("the server does not tell token ids (return_token_ids): it can't be trained on; vLLM's does")
    log_probs = () if entries is None else entries.get("token_logprobs") or ()
    if len(ids) != len(log_probs) or not all(_is_log_prob(x) for x in log_probs):
        raise WireError(f"the server told {len(ids)} token ids and {len(log_probs)} log-probs: it must tell one each")
    reason = choice.get("finish_reason")
    if reason not in (None, "stop", "length"):
        raise WireError(f"the server ended an answer for the reason {reason!r}, which nobody asked for")
    return CompletionChunk(tuple(map(int, ids)), tuple(map(float, log_probs)), reason)


def check_end(part: CompletionChunk, last: int | None, sampling: Sampling) -> None:
    """Raise WireError where the completion, whose last token is `last`, stopped at no stop token of the request."""
    if part.reason == "stop" and last not in sampling.stop_token_ids:
        raise WireError(
            f"the server stopped at the token {last}, which is none of stop_token_ids: it has stop tokens of its own; "
            "start it without them (vLLM: --generation-config vllm)"
        )


def error_text(body: Any) -> str:
    """Return the message of an error, in any of the formats that servers use."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        error = error.get("message", error.get("detail", error))
    return str(error)[:500]


def _is_log_prob(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value <= 1e-6


def _object(data: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise WireError(f"the server's stream is no JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise WireError(f"the server's stream holds no object: {data[:80]!r}")
    return value
