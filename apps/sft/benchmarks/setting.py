"""What both sides of `against_trl` are given: a model in a directory, the rows of each step, the engine's settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from apps.common.tokens import load_tokenizer
from apps.quickstart.model import save_tiny_model
from apps.quickstart.tokenizer import PAD, build_tokenizer
from apps.sft.config import DataConfig, SftConfig
from apps.sft.course import course_of
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.reading.sources import Source
from apps.sft.samples import Sample, as_sample
from engines import EngineConfig

Steps = Sequence[Sequence[Sample]]
"""The rows of each step."""

ROW_TOKENS, ROWS, LONGEST, WORDS = 8192, 16, 2048, 4096
"""Of a step on a GPU: tokens, rows, tokens of a row at most, and different ids in all."""


@dataclass(frozen=True)
class Task:
    """`model`: a directory with its tokenizer."""

    model: Path
    tokenizer: Any
    steps: Steps
    engine: EngineConfig

    @property
    def tokens(self) -> list[int]:
        """Tokens of each step."""
        return [sum(len(row["input_ids"]) for row in rows) for rows in self.steps]


def tiny(folder: Path, count: int) -> Task:
    """The quickstart's model of 0.2 million parameters and its demonstrations, 64 short rows a step, on a CPU."""
    model = save_tiny_model(folder / "model", 0)
    tokenizer = load_tokenizer(model)
    data = DataConfig(max_tokens=256, demonstrations=4096)
    source = Source(write_demonstrations(data, 0, folder / "rows.jsonl"))
    rows = load_conversations(data, [source], tokenizer, None, folder / "tokens")
    course = course_of(SftConfig(steps=count, data=data), rows)
    steps = [[rows.train[i] for i in course.rows(step)] for step in range(count)]
    return Task(model, tokenizer, steps, EngineConfig(device="cpu", lr=3e-3))


HYBRID = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""0.67 B parameters: the model of libs/engines/benchmarks/step_gpu.py."""


def hybrid(folder: Path, count: int) -> Task:
    """A Qwen3.5 of 0.67 B parameters with random weights, 8,192 tokens a step in 16 rows of long-tailed lengths."""
    tokenizer = build_tokenizer()
    model = folder / "model"
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID, pad_token_id=tokenizer.convert_tokens_to_ids(PAD)))
    made.save_pretrained(model)
    tokenizer.save_pretrained(model)
    engine = EngineConfig(device="cuda", lr=1e-4, max_tokens_per_rank=ROW_TOKENS)
    return Task(model, tokenizer, random_steps(count), engine)


def random_steps(count: int) -> Steps:
    """Rows of ids that are the rarer the larger, so that there is something to learn; the last 70 % are trained."""
    rng = torch.Generator().manual_seed(0)
    return [[_row(length, rng) for length in _lengths(rng)] for _ in range(count)]


def _row(length: int, rng: torch.Generator) -> Sample:
    ids = (torch.rand(length, generator=rng) ** 4 * WORDS).long()
    return as_sample(ids.tolist(), [place >= max(1, int(0.3 * length)) for place in range(length)])


def _lengths(rng: torch.Generator) -> list[int]:
    """`ROWS` lengths that add up to `ROW_TOKENS`, lognormal but for the last."""
    while True:
        draws = (torch.randn(ROWS - 1, generator=rng) * 0.8 + 5.9).exp().clamp(16, LONGEST).int().tolist()
        left = ROW_TOKENS - sum(draws)
        if 16 <= left <= LONGEST:
            return [*draws, left]


TASKS: dict[str, Callable[[Path, int], Task]] = {"cpu": tiny, "cuda": hybrid}
