"""What both sides of `megatron_vs_core.py` are given, and how they are timed."""

import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import step_gpu
import torch
import torch.distributed as dist
from torch import Tensor

from engines.parallel.layout import ParallelLayout

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LR, CLIP, EPS = 1e-5, 1.0, 1e-8
"""Settings of both optimizers; the others are EngineConfig's defaults."""


@dataclass(frozen=True)
class Run:
    """The settings that both sides share: `tokens` a step of each copy of the model, `steps` to time, the folder for
    gradients, `ranks`, and how many of them share each matrix; `shape`: changes to the model; `optimizer`: what updates
    our side (`megatron_optimizer`)."""

    device: Literal["cuda", "cpu"]
    tokens: int
    steps: int
    folder: Path
    ranks: int = 1
    tensor_parallel: int = 1
    shape: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Literal["auto", "torch", "core"] = "auto"

    @property
    def layout(self) -> ParallelLayout:
        """The layout of the ranks: those that share no matrix split the batch."""
        return ParallelLayout.of_world(self.ranks, tp=self.tensor_parallel)

    @property
    def copies(self) -> int:
        """The number of copies of the model, each with tokens of its own."""
        return self.layout.dp


def say(**facts: Any) -> None:
    """Print a row on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(json.dumps(facts), flush=True)


def lengths(run: Run) -> list[int]:
    """Return the lengths of one copy's packed sequences, the same for each copy, so that any plan gives all the same
    work."""
    return step_gpu.lengths_of(run.tokens, run.tokens)


def batch_of(run: Run) -> Any:
    """Return the sequences of all copies, one copy after another."""
    return step_gpu.batch_of(lengths(run) * run.copies)


def synchronize(run: Run) -> None:
    """Wait for the device."""
    if run.device == "cuda":
        torch.cuda.synchronize()


def measure(run: Run, side: str, step: Callable[[], dict[str, float]], before: int, **facts: Any) -> None:
    """Time `step` after a first call and two more, and print the first rank's row, with the tokens of all copies.

    `before`: bytes in use before the engine was.
    """
    began = time.perf_counter()
    step()
    synchronize(run)
    first = time.perf_counter() - began
    for _ in range(2):
        step()
    synchronize(run)
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(run.steps):
        began = time.perf_counter()
        last = step()
        synchronize(run)
        times.append(time.perf_counter() - began)
    middle = sorted(times)[run.steps // 2]
    peak = torch.cuda.max_memory_allocated() - before if run.device == "cuda" else 0
    say(
        side=side,
        step_ms=round(middle * 1e3, 2),
        fastest_ms=round(min(times) * 1e3, 2),
        tokens=run.tokens * run.copies,
        tokens_per_s=round(run.tokens * run.copies / middle),
        peak_gib=round(peak / 2**30, 2),
        first_s=round(first, 1),
        **last,
        **facts,
    )


def in_use(run: Run) -> int:
    """Return the bytes of the device that are in use."""
    gc.collect()
    return torch.cuda.memory_allocated() if run.device == "cuda" else 0


def keep(run: Run, side: str, loss: float, gradients: dict[str, Tensor]) -> None:
    """Save the mean loss and the gradients of the first step before its update, by our names of parameters.

    Of several ranks the first does: gradients are added up over copies by then, and of a matrix it has its part.
    """
    say(side=side, before_any_update=True, loss=loss)
    if dist.get_rank() == 0:
        torch.save({"loss": loss, "gradients": gradients}, run.folder / f"{side}.pt")
