"""The tokens that stop a model, as its checkpoint names them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from chat_tools.rendering.template import ChatTemplate, tokens_as_text
from chat_tools.rendering.turn_delimiters import find_turn_delimiters


def read_stop_tokens(source: str | Path | Mapping[str, Any] | Any, tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens that stop a model: `eos_token_id` of its generation config, as texts.

    `source` is the model's folder (its generation_config.json is read), the config as a dict, or an object with
    `eos_token_id`; a folder without the file, or a config without the entry, gives (). ValueError for ids that the
    tokenizer does not have.
    """
    config: Any = source
    if isinstance(source, str | Path):
        path = Path(source) / "generation_config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    entry = config.get("eos_token_id") if isinstance(config, Mapping) else getattr(config, "eos_token_id", None)
    ids = [] if entry is None else [entry] if isinstance(entry, int) else list(entry)
    return tokens_as_text(ids, tokenizer)


def turn_ends(
    tokenizer: Any,
    stop_tokens: Iterable[str | int] | None = None,
    tools: Sequence[Any] | None = None,
    **options: Any,
) -> tuple[str, ...]:
    """Return the tokens that may end a turn, at any of which sampling has to stop, as texts, longest first.

    They are `stop_tokens` (see `read_stop_tokens`; without them, those that the tokenizer and the known formats of
    calls have), and those with which the template itself ends a turn. `tools` and `options` are those of `render`.
    """
    stops = None if stop_tokens is None else tokens_as_text(stop_tokens, tokenizer)
    template = ChatTemplate(tokenizer, tools, options, stops)
    return find_turn_delimiters(template, {"role": "assistant", "content": ""}).stops
