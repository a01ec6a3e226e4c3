"""The inputs of both sides of `against_trl`: a model in a directory, the rows of each step, the engine's settings."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from apps.common.data.tokenizer import load_tokenizer
from apps.quickstart.model import MakeConfig, save_tiny_model, tiny_config
from apps.quickstart.tokenizer import PAD, build_tokenizer
from apps.sft.config import DataConfig, SftConfig
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.reading.samples import Sample, as_sample
from apps.sft.reading.sources import Source
from apps.sft.step_plan import plan_steps
from engines import EngineConfig, LoraConfig

Steps = Sequence[Sequence[Sample]]
"""The rows of each step."""

ROW_TOKENS = 8192
"""Of a step on a GPU."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step's rows: how many rows, their tokens in all, the most of a row, and the median of
    logarithms."""

    rows: int
    tokens: int
    longest: int
    middle: float
    words: int
    """Different ids in all."""

    def draw(self, rng: torch.Generator) -> list[int]:
        """Return lengths that add up to `tokens`, lognormal but for the last."""
        while True:
            draws = (torch.randn(self.rows - 1, generator=rng) * 0.8 + self.middle).exp().clamp(16, self.longest)
            lengths: list[int] = draws.int().tolist()
            left = self.tokens - sum(lengths)
            if 16 <= left <= self.longest:
                return [*lengths, left]


ON_GPU = Lengths(16, ROW_TOKENS, 2048, 5.9, 4096)
ON_CPU = Lengths(12, 2560, 1024, 5.0, 256)


@dataclass(frozen=True)
class Task:
    """The inputs of a side. `model`: a directory with its tokenizer."""

    model: Path
    tokenizer: Any
    steps: Steps
    engine: EngineConfig

    @property
    def tokens(self) -> list[int]:
        """The tokens of each step."""
        return [sum(len(row["input_ids"]) for row in rows) for rows in self.steps]


def _wide(hidden: int) -> MakeConfig:
    """Return the quickstart's model at a width: 64 is its own, with 0.2 million parameters; 256 has 2.8."""

    def make(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
        config = tiny_config(vocab_size, pad_token_id, eos_token_id, hidden)
        half = config.head_dim // 8  # of the rotated pairs
        config.rope_parameters = {**config.rope_parameters, "mrope_section": [half, half // 2, half // 2]}
        return config

    return make


def tiny(folder: Path, count: int, hidden: int = 64) -> Task:
    """Return the quickstart's model at a width and its demonstrations, 64 short rows a step, on a CPU."""
    model = save_tiny_model(folder / "model", 0, _wide(hidden))
    tokenizer = load_tokenizer(model)
    data = DataConfig(max_tokens=256, demonstrations=4096)
    source = Source(write_demonstrations(data, 0, folder / "rows.jsonl"))
    rows = load_conversations(data, [source], tokenizer, None, folder / "tokens")
    plan = plan_steps(SftConfig(steps=count, data=data), rows)
    steps = [[rows.train[i] for i in plan.rows(step)] for step in range(count)]
    return Task(model, tokenizer, steps, EngineConfig(device="cpu", lr=3e-3))


def mixed(folder: Path, count: int, hidden: int = 64, lora: LoraConfig = LoraConfig()) -> Task:  # noqa: B008
    """Return the quickstart's model at a width, on a CPU, on 2,560 tokens a step in 12 rows of long-tailed lengths."""
    model = save_tiny_model(folder / "model", 0, _wide(hidden))
    engine = EngineConfig(device="cpu", lr=1e-3, lora=lora)
    return Task(model, load_tokenizer(model), random_steps(count, ON_CPU), engine)


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
    """Return a random Qwen3.5 of 0.67 B parameters, 8,192 tokens a step in 16 rows of long-tailed lengths."""
    tokenizer = build_tokenizer()
    model = folder / "model"
    torch.manual_seed(0)
    with torch.device("cuda"):
        made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID, pad_token_id=tokenizer.convert_tokens_to_ids(PAD)))
    made.save_pretrained(model)
    tokenizer.save_pretrained(model)
    engine = EngineConfig(device="cuda", lr=1e-4, max_tokens_per_rank=ROW_TOKENS)
    return Task(model, tokenizer, random_steps(count, ON_GPU), engine)


def random_steps(count: int, lengths: Lengths) -> Steps:
    """Return rows of random ids, rarer the larger, so that there is something to learn; the last 70 % are trained."""
    rng = torch.Generator().manual_seed(0)
    return [[_row(length, lengths.words, rng) for length in lengths.draw(rng)] for _ in range(count)]


def _row(length: int, words: int, rng: torch.Generator) -> Sample:
    ids = (torch.rand(length, generator=rng) ** 4 * words).long()
    return as_sample(ids.tolist(), [place >= max(1, int(0.3 * length)) for place in range(length)])


CASES: dict[str, Callable[[Path, int], Task]] = {
    "short": tiny,
    "larger-short": partial(tiny, hidden=256),
    "long": mixed,
    "larger": partial(mixed, hidden=256),
    "lora": partial(mixed, hidden=256, lora=LoraConfig(rank=8)),
}
"""On a CPU, by name."""


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"gradient_checkpointing": True},
    "no checkpointing": {"gradient_checkpointing": False},
    "padding-free": {"gradient_checkpointing": False, "padding_free": True},
    "packing": {
        "gradient_checkpointing": False,
        "packing": True,
        "max_length": ROW_TOKENS,
        "per_device_train_batch_size": 1,
    },
}
"""What differs from TRL's defaults. "padding-free" packs the rows of a step, "packing" (best fit) all rows."""


@dataclass(frozen=True)
class Curve:
    """Loss, useful tokens and seconds of each step, from the end of the one before; the device's peak from step 4."""

    losses: list[float]
    tokens: list[int]
    seconds: list[float]
    peak_gib: float = 0.0

    def rate(self) -> float:
        """Return useful tokens a second: the median of the steps after the third."""
        rates = sorted(n / took for n, took in zip(self.tokens[3:], self.seconds[3:], strict=True))
        return rates[len(rates) // 2]


class Stopwatch:
    """A stopwatch: the process's own seconds on a CPU, where others may be busy, the clock's on a GPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"
        self.seconds: list[float] = []
        self._last = self._now()

    def _now(self) -> float:
        if not self.cuda:
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def mark(self) -> None:
        """End one step."""
        now = self._now()
        self.seconds.append(now - self._last)
        self._last = now
        if self.cuda and len(self.seconds) == 3:
            torch.cuda.reset_peak_memory_stats()

    def peak_gib(self) -> float:
        """Return the device's peak memory since the third mark, in GiB."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.cuda else 0.0
