"""Conversations of a file as samples: read, rendered, measured, split; what was left out is counted by its reason."""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from apps.common.prompts import ROLES, Row, read_rows
from apps.common.split import held_out_keys
from apps.quickstart.arithmetic import distinct, problems
from apps.quickstart.demonstrations import demonstration
from apps.sft.config import DataConfig
from apps.sft.samples import Sample, sample_of
from rollout import calculator


@dataclass(frozen=True)
class Conversations:
    """Samples to train on and held out, and how many rows were left out, by reason."""

    train: list[Sample]
    held_out: list[Sample]
    skipped: Mapping[str, int]


def load_conversations(config: DataConfig, path: Path, tokenizer: PreTrainedTokenizerBase) -> Conversations:
    """Read `path` and, where it is given, the held-out file.

    Raises:
        ValueError: a file or a row can't be used, or too little is left; the text names the row and the remedy.
    """
    skipped: Counter[str] = Counter()
    train = _samples(config, path, tokenizer, skipped)
    if config.eval_data is not None:
        held_out = _samples(config, config.eval_data, tokenizer, skipped)
    else:
        chosen = held_out_keys((key for key, _ in train), config.eval_share)
        held_out = [(key, sample) for key, sample in train if key in chosen]
    asked = {key for key, _ in held_out}
    kept = [sample for key, sample in train if key not in asked]
    return _checked(path, kept, [sample for _, sample in held_out], skipped)


def write_demonstrations(config: DataConfig, seed: int, path: Path) -> Path:
    """Write the made task's demonstrations as a file of conversations, the form that real ones come in."""
    digits = 2 if config.task == "arithmetic" else 3
    stream = problems(random.Random(seed), digits)
    count = min(config.demonstrations, 10 ** (2 * digits) // 2)
    tools = [calculator().schema] if config.task == "calculator" else None
    rows = ({"messages": demonstration(p, config.task), "tools": tools} for p in distinct(stream, count))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def _samples(
    config: DataConfig, path: Path, tokenizer: PreTrainedTokenizerBase, skipped: Counter[str]
) -> list[tuple[str, Sample]]:
    found: list[tuple[str, Sample]] = []
    for number, row in enumerate(read_rows(path), start=1):
        messages = _messages(path, number, row, config.messages_column)
        try:
            sample = sample_of(tokenizer, messages, _tools(row, config.tools_column))
        except jinja2.TemplateError as error:
            raise ValueError(f"{path}, row {number}: the chat template refuses the conversation: {error}") from error
        if len(sample["input_ids"]) > config.max_tokens:
            skipped[f"longer than --max-tokens {config.max_tokens}"] += 1
        elif not bool(sample["loss_mask"].any()):
            skipped["nothing of the assistant's to train on"] += 1
        else:
            found.append((repr(messages[0]) + repr(messages[-1]), sample))
    return found


def _messages(path: Path, number: int, row: Row, column: str) -> Sequence[dict[str, Any]]:
    if column not in row:
        raise ValueError(
            f"{path}, row {number}: no column {column!r}; it has {', '.join(row)}. Name yours with --messages-column"
        )
    value = row[column]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{path}, row {number}, column {column!r}: expected a list of messages, got {value!r:.60}")
    for message in value:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ValueError(
                f"{path}, row {number}, column {column!r}: a message needs a role of {', '.join(ROLES)}, "
                f"got {message!r:.60}"
            )
    return [_with_parsed_arguments(path, number, message) for message in value]


def _with_parsed_arguments(path: Path, number: int, message: dict[str, Any]) -> dict[str, Any]:
    """Files often hold a call's arguments as JSON text; chat templates want the object."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for call in calls:
        function = dict(call.get("function", call))
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, row {number}: arguments of a tool call are not JSON: {error.msg}") from error
        parsed.append({"type": "function", "function": function})
    return {**message, "tool_calls": parsed}


def _tools(row: Row, column: str) -> Sequence[Any] | None:
    tools = row.get(column)
    return json.loads(tools) if isinstance(tools, str) and tools else tools or None


def _checked(path: Path, train: list[Sample], held_out: list[Sample], skipped: Counter[str]) -> Conversations:
    if not train or not held_out:
        reasons = "; ".join(f"{count} {reason}" for reason, count in skipped.items()) or "none was skipped"
        raise ValueError(
            f"{path}: {len(train)} conversations to train on and {len(held_out)} held out are too few ({reasons})"
        )
    return Conversations(train, held_out, dict(skipped))
