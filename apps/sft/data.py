"""Conversations of a file as samples: rendered, measured, split; what was left out is counted by its reason."""

import json
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from apps.quickstart.arithmetic import distinct, problems
from apps.quickstart.demonstrations import demonstration
from apps.sft.config import DataConfig
from apps.sft.conversations import Conversation, read_conversations
from apps.sft.samples import Sample, UnprovenMaskError, sample_of
from apps.sft.split import split_against, split_off
from rollout import calculator


@dataclass(slots=True)
class Skipped:
    """How many rows were left out for each reason, and where the first of each was."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, path: Path, row: int) -> None:
        """Count a row."""
        self.counts[reason] = self.counts.get(reason, 0) + 1
        self.first.setdefault(reason, f"{path.name}, row {row}")

    def lines(self) -> list[str]:
        """One line a reason, for people."""
        return [
            f"left out {count} conversations: {reason} (first: {self.first[reason]})"
            for reason, count in self.counts.items()
        ]


@dataclass(frozen=True)
class Conversations:
    """Samples to train on and held out, and what was left out.

    Rows read = len(train) + len(held_out) + the sum of `skipped.counts`, over all files.
    """

    train: list[Sample]
    held_out: list[Sample]
    skipped: Skipped


@dataclass(frozen=True, slots=True)
class _Kept:
    """The usable rows of a file, side by side."""

    rows: list[int]
    keys: list[str]
    samples: list[Sample]


def load_conversations(config: DataConfig, path: Path, tokenizer: PreTrainedTokenizerBase) -> Conversations:
    """Read `path` and, where it is given, the held-out file.

    Identical conversations are on one side: of a single file a share of the different ones is held out; what is in a
    held-out file of its own is removed from the training rows, and counted.

    Raises:
        ValueError: a file or a row can't be used, or too little is left; the text names the row and the remedy.
    """
    skipped = Skipped()
    kept = _usable(config, path, tokenizer, skipped)
    if config.eval_data is None:
        split = split_off(kept.keys, config.eval_share)
        held_out = [kept.samples[i] for i in split.held_out]
    else:
        other = _usable(config, config.eval_data, tokenizer, skipped)
        split = split_against(kept.keys, other.keys)
        held_out = other.samples
    for i in split.removed:
        skipped.add(f"also in {config.eval_data}, which is held out", path, kept.rows[i])
    found = Conversations([kept.samples[i] for i in split.train], held_out, skipped)
    if not found.train or not found.held_out:
        raise ValueError(_too_few(path, found, len(set(kept.keys))))
    return found


def write_demonstrations(config: DataConfig, seed: int, path: Path) -> Path:
    """Write the synthetic task's demonstrations as a file of conversations, the form that real ones come in."""
    digits = 2 if config.task == "arithmetic" else 3
    stream = problems(random.Random(seed), digits)
    count = min(config.demonstrations, 10 ** (2 * digits) // 2)
    tools = [calculator().schema] if config.task == "calculator" else None
    rows = ({"messages": demonstration(p, config.task), "tools": tools} for p in distinct(stream, count))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".writing")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)
    return path


def _usable(config: DataConfig, path: Path, tokenizer: PreTrainedTokenizerBase, skipped: Skipped) -> _Kept:
    kept = _Kept([], [], [])
    for conversation in read_conversations(path, config.messages_column, config.tools_column):
        try:
            sample = _sample(path, conversation, tokenizer)
        except UnprovenMaskError as error:
            # Token and message numbers differ from row to row, the reason does not.
            skipped.add(f"its mask can't be proven: {re.sub(r'[0-9]+', 'N', str(error))}", path, conversation.row)
            continue
        if len(sample["input_ids"]) > config.max_tokens:
            skipped.add(f"longer than --max-tokens {config.max_tokens}", path, conversation.row)
        elif not bool(sample["loss_mask"].any()):
            skipped.add("nothing of the assistant's to train on", path, conversation.row)
        else:
            kept.rows.append(conversation.row)
            kept.keys.append(conversation.key)
            kept.samples.append(sample)
    return kept


def _sample(path: Path, conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> Sample:
    try:
        return sample_of(tokenizer, conversation.messages, conversation.tools)
    except UnprovenMaskError:
        raise
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        # A template that joins what is no text to text is a TypeError of Jinja's own making.
        raise ValueError(
            f"{path}, row {conversation.row}: the chat template refuses the conversation: {error}"
        ) from error


def _too_few(path: Path, found: Conversations, different: int) -> str:
    reasons: Sequence[str] = found.skipped.lines() or ["none was left out"]
    return (
        f"{path}: {len(found.train)} conversations to train on and {len(found.held_out)} held out are too few; "
        f"{different} different ones can be used ({'; '.join(reasons)})"
    )
