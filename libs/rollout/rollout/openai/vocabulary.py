"""The vocabulary of a server of vLLM, held to a tokenizer of this process: what its ids mean there, as text."""

from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from rollout.openai.settings.config import OpenAIConfig

_PART = 1024
"""Ids of one request."""
_SECONDS = 60.0


def check_vocabulary(config: OpenAIConfig, ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> None:
    """Compare the texts of all `ids` with those of the server's tokenizer, by its route /detokenize.

    `decode`: ids to text, special tokens too.

    Raises:
        ValueError: a text differs, which the error names, or the server does not tell.
    """
    url = f"{config.base_url.rstrip('/').removesuffix('/v1')}/detokenize"
    with httpx2.Client(headers=config.headers, timeout=_SECONDS, trust_env=False) as client:

        def equal(part: Sequence[int]) -> bool:
            return _text(client, url, {"tokens": list(part), "model": config.model}) == decode(part)

        for start in range(0, len(ids), _PART):
            part = ids[start : start + _PART]
            if equal(part):
                continue
            while len(part) > 1:
                half = part[: len(part) // 2]
                part = part[len(half) :] if equal(half) else half
            raise ValueError(
                f"{config.base_url} has another tokenizer than the model: token {part[0]} is {decode(part)!r} here and "
                f"{_text(client, url, {'tokens': list(part), 'model': config.model})!r} there; serve a model of the "
                "same family"
            )


def _text(client: httpx2.Client, url: str, body: dict[str, Any]) -> str:
    """Return what the server decodes ids to."""
    try:
        response = client.post(url, json={name: value for name, value in body.items() if value is not None})
    except httpx2.TransportError as error:
        raise ValueError(f"nobody answers at {url} ({error}): start the server first") from error
    text = response.json().get("prompt") if response.status_code == 200 else None
    if not isinstance(text, str):
        raise ValueError(
            f"{url} does not tell what ids mean (status {response.status_code}), so that nobody knows whether its "
            "tokenizer is the model's: serve with vLLM, and with its tokenizer (no --skip-tokenizer-init)"
        )
    return text
