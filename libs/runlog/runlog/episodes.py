"""Sampled episodes as the report shows them.

Keys that an episode may have (only `step` is needed, the rest is shown where present):
`tokens` list of the tokens' text; `mask` list of bool, true where a token is trained; `advantage` one number, or one a
token; `log_probs` the sampler's, one a token; `versions` one a token, -1 where no policy made it; `reward`; `group`;
`messages` the conversation as role/content mappings (`tool_calls`, `reasoning_content` as chat templates know them);
`expected` the answer that was wanted; `parts` what the reward is made of, by name; `error` why the episode failed;
`split` "training" (the default) or "held-out"; `environment` its name, where a run has several; `metadata` any small
mapping. Episodes of one step, split, environment and group are siblings.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from runlog.sampling import TRAINING

ROW_TEXT = 20_000  # characters of a text in a tracker's table
PER_TOKEN = ("mask", "advantage", "log_probs", "versions")


def view(episode: Mapping[str, Any], number: int, max_tokens: int, max_characters: int = 20_000) -> dict[str, Any]:
    """Return one episode for the page: each text has at most `max_characters`, long tokens lose their middle.

    Raises:
        ValueError: its token lists differ in length.
    """
    tokens = [str(t) for t in episode.get("tokens") or []]
    shown: dict[str, Any] = {
        "id": number,
        "step": int(episode["step"]),
        "reward": _number(episode.get("reward")),
        "group": episode.get("group"),
        "length": len(tokens),
        "split": str(episode.get("split") or TRAINING),
        "environment": episode.get("environment"),
        "expected": _text(episode.get("expected"), max_characters),
        "error": _text(episode.get("error"), max_characters),
        "parts": {str(k): _number(v) for k, v in (episode.get("parts") or {}).items()},
        "messages": [_message(m, max_characters) for m in episode.get("messages") or []],
        "metadata": {str(k): str(v)[:max_characters] for k, v in (episode.get("metadata") or {}).items()},
        "tokens": tokens,
        "cut": 0,
    }
    for key in PER_TOKEN:
        values = episode.get(key)
        if key == "advantage" and values is not None and not isinstance(values, Sequence):
            values = [float(values) if on else 0.0 for on in episode.get("mask") or [True] * len(tokens)]
        if values is not None and len(values) != len(tokens):
            raise ValueError(f"episode {number} (step {shown['step']}): {len(values)} {key} for {len(tokens)} tokens")
        shown[key] = values
    if shown["mask"] is not None:
        shown["mask"] = [int(bool(m)) for m in shown["mask"]]
    for key in ("advantage", "log_probs"):
        if shown[key] is not None:
            shown[key] = [None if v is None else round(float(v), 4) for v in shown[key]]
    shown["trained"] = sum(shown["mask"]) if shown["mask"] else None
    shown["calls"] = sum(len(m.get("calls", ())) for m in shown["messages"])
    return _cut(shown, max_tokens)


def table_row(episode: Mapping[str, Any]) -> dict[str, Any]:
    """Return one episode as a row of a tracker's table: plain texts and numbers. The prompt is what stands before the
    first sampled token, the completion all that follows."""
    tokens, mask = [str(t) for t in episode.get("tokens") or []], list(episode.get("mask") or [])
    start = mask.index(True) if True in mask else len(tokens)
    advantage = episode.get("advantage")
    if isinstance(advantage, Sequence):
        advantage = advantage[start] if start < len(advantage) else None
    return {
        "step": int(episode["step"]),
        "split": str(episode.get("split") or TRAINING),
        "environment": _text(episode.get("environment"), ROW_TEXT),
        "group": _text(episode.get("group"), ROW_TEXT),
        "prompt": "".join(tokens[:start])[:ROW_TEXT],
        "completion": "".join(tokens[start:])[:ROW_TEXT],
        "expected": _text(episode.get("expected"), ROW_TEXT),
        "reward": _number(episode.get("reward")),
        **{f"reward/{part}": _number(value) for part, value in (episode.get("parts") or {}).items()},
        "advantage": _number(advantage),
        "error": _text(episode.get("error"), ROW_TEXT),
    }


def _cut(shown: dict[str, Any], max_tokens: int) -> dict[str, Any]:
    """Keep the first and the last tokens of a long episode; `cut` is the number left out, `head` their place."""
    extra = len(shown["tokens"]) - max_tokens
    if extra > 0:
        head = max_tokens // 2
        tail = len(shown["tokens"]) - (max_tokens - head)
        for key in ("tokens", *PER_TOKEN):
            if shown[key] is not None:
                shown[key] = [*shown[key][:head], *shown[key][tail:]]
        shown["cut"], shown["head"] = extra, head
    return shown


def _message(message: Mapping[str, Any], most: int) -> dict[str, Any]:
    content = message.get("content") or ""
    if not isinstance(content, str):  # a list of typed parts
        content = "\n".join(str(part.get("text", f"[{part.get('type', 'part')}]")) for part in content)
    shown: dict[str, Any] = {"role": str(message.get("role", "")), "content": content[:most]}
    if message.get("reasoning_content"):
        shown["reasoning"] = str(message["reasoning_content"])[:most]
    calls = [call.get("function", call) for call in message.get("tool_calls") or []]
    if calls:
        shown["calls"] = [
            {"name": str(c.get("name", "")), "arguments": _arguments(c.get("arguments", ""))[:most]} for c in calls
        ]
    return shown


def _arguments(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _text(value: Any, most: int) -> str | None:
    return None if value is None else str(value)[:most]


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
