"""Planned against measured peak memory of small runs: `python -m runplan.testing.plan_vs_memory --ranks 1`.

Prints a line a case. `--ranks 2` runs those of two devices. Sizes of heads and layers are those of
`engines.tiny.FUSED_SIZES`, since kernels are tuned for each; what differs is how many of them there are. Nothing in the
plan was fitted to these cases.
"""

import argparse
import gc
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from engines import EngineConfig, build_engine
from engines.devices.detect import devices_of
from engines.launch import launch
from engines.loading import compute_dtype
from engines.parallel.configured_layout import shards_of
from engines.parallel.stages import split_layers
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import SFT
from runplan.estimates.peak_memory import Peak, Tokens, fsdp_peak, megatron_peak
from runplan.layout.grid import make_grid
from runplan.model.model_shape import ModelShape, shape_of

MIB = 2**20
BOUND = 0.1
LENGTHS = (517, 33, 260, 1090, 148, 924, 70, 641, 385, 12, 777, 205)
"""Uneven, packed lengths of one micro-batch a rank."""


@dataclass(frozen=True)
class MemoryCase:
    """A small run: a kind of `tiny_model` with changes, settings of the engine, and how many devices."""

    kind: str
    sizes: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 1
    lengths: tuple[int, ...] = LENGTHS

    def __str__(self) -> str:
        """Return kind, backend, and changed settings."""
        changes = {**self.sizes, **self.settings}
        backend = changes.pop("backend", "fsdp2")
        return f"{self.kind}, {backend}, {self.ranks} ranks: " + ", ".join(f"{k} {v}" for k, v in changes.items())

    def config(self, device: str) -> EngineConfig:
        """Return the engine's config: bfloat16 and recomputed layers, as full-size runs have them; FSDP2 shards."""
        usual: dict[str, Any] = {"dtype": "bfloat16", "gradient_checkpointing": True, "max_tokens_per_rank": 8192}
        if self.settings.get("backend") != "megatron":
            usual["weights"] = "sharded"
        return EngineConfig(device=device, **{**usual, **self.settings})  # type: ignore[arg-type]

    def model(self) -> nn.Module:
        """Return the model with random weights."""
        plain = self.kind == "attention"
        fused = {
            name: size for name, size in FUSED_SIZES.items() if not (plain and name.startswith(("linear", "rope")))
        }
        return tiny_model(self.kind, scale=1.0, **{**fused, **self.sizes})

    def plan(self, shape: ModelShape, config: EngineConfig, width: int) -> Peak:
        """Return the planned peak: with the tokens of the fullest rank, two thirds of which train."""
        tokens = -(-sum(self.lengths) // self.ranks)
        if config.tensor_parallel > 1:
            tokens = sum(self.lengths)
        counted = Tokens(tokens, tokens * 2 // 3)
        if config.backend == "fsdp2":
            return fsdp_peak(shape, config, shards_of(config, self.ranks), counted, width)
        grid = make_grid(
            self.ranks,
            tp=config.tensor_parallel,
            pp=config.pipeline_parallel,
            ep=config.expert_parallel,
            etp=config.expert_tensor_parallel,
        )
        layers = [sum(stage) for stage in split_layers(shape.layers, config.pipeline_parallel)]
        return megatron_peak(shape, config, grid, layers, counted, width)


WIDE_HEAD = {"vocab_size": 65_536, "num_hidden_layers": 24}
DEEP = {"vocab_size": 8192, "num_hidden_layers": 96}
EXPERTS = {"vocab_size": 8192, "num_hidden_layers": 16, "num_experts": 64, "moe_intermediate_size": 128}
OTHER = {"vocab_size": 32_768, "num_hidden_layers": 40, "intermediate_size": 1536}
NARROW_EXPERTS = {"vocab_size": 16_384, "num_hidden_layers": 12, "num_experts": 32, "moe_intermediate_size": 256}
WIDE_EXPERTS = {"vocab_size": 32_768, "num_hidden_layers": 8, "num_experts": 16, "moe_intermediate_size": 512}
MEGATRON = {"backend": "megatron"}
CASES = (
    MemoryCase("dense", DEEP),
    MemoryCase("dense", WIDE_HEAD),
    MemoryCase("attention", DEEP),
    MemoryCase("moe", EXPERTS),
    MemoryCase("dense", DEEP, MEGATRON),
    MemoryCase("moe", EXPERTS, MEGATRON),
    MemoryCase("attention", WIDE_HEAD, MEGATRON),
    MemoryCase("dense", OTHER),
    MemoryCase("moe", NARROW_EXPERTS),
    MemoryCase("dense", OTHER, MEGATRON),
    MemoryCase("moe", NARROW_EXPERTS, MEGATRON, lengths=(1800, 7, 955, 61, 402, 1290, 19)),
    MemoryCase("moe", WIDE_EXPERTS, MEGATRON, lengths=(3000, 5, 5, 48, 777)),
    MemoryCase("dense", DEEP, ranks=2),
    MemoryCase("moe", EXPERTS, ranks=2),
    MemoryCase("dense", WIDE_HEAD, {**MEGATRON, "tensor_parallel": 2}, ranks=2),
    MemoryCase("moe", EXPERTS, {**MEGATRON, "expert_parallel": 2}, ranks=2),
    MemoryCase("dense", OTHER, ranks=2),
)
"""Cases on GPUs: dense and experts, both backends, one and two devices."""


@dataclass(frozen=True)
class Compared:
    """Bytes of the fullest rank: between steps, and at the peak."""

    case: MemoryCase
    planned: Peak
    states: int
    peak: int

    @property
    def error(self) -> float:
        """Error of the plan, relative to the measured bytes."""
        return self.planned.bytes / self.peak - 1

    def __str__(self) -> str:
        """Return a line of the table."""
        planned = f"{self.planned.bytes / MIB:8.1f} MiB planned ({self.planned.when})"
        return f"{planned} {self.peak / MIB:8.1f} measured {self.error:+6.1%}  {self.case}"


def measure(case: MemoryCase, device: str) -> Compared:
    """Measure the peak of the second of two steps, less what libraries took before the engine was built.

    Every rank calls it.
    """
    gc.collect()  # engines have reference cycles: an earlier one would be freed in between
    devices, config = devices_of(device), case.config(device)
    square = torch.ones(256, 256, device=device, dtype=torch.bfloat16)
    square = square @ square  # libraries have their workspaces now
    before = _allocated(device)
    module = case.model()
    shape = shape_of(module.config, case.kind)
    engine = build_engine(config, module)
    batch = tiny_batch(list(case.lengths))
    engine.train_batch(batch, SFT())
    states = _allocated(device) - before
    devices.reset_peak()
    metrics = engine.train_batch(batch, SFT())
    assert metrics["micro_batches"] == 1.0, "the plan is of one micro-batch a rank"
    figures = devices.memory()
    assert figures is not None
    worst = torch.tensor([states, figures.peak - before], dtype=torch.int64, device=device)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    width = compute_dtype(config, torch.device(device)).itemsize
    states, peak = (int(value) for value in worst)
    return Compared(case, case.plan(shape, config, width), states, peak)


def _allocated(device: str) -> int:
    figures = devices_of(device).memory()
    if figures is None:
        raise ValueError(f"nobody counts the memory of a {device}: measure on cuda or npu")
    return figures.allocated


def main() -> None:
    """Measure the cases of the given number of devices, each in processes of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose line has it, such as 'dense, megatron'")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    cases = [case for case in CASES if case.ranks == options.ranks and options.only in str(case)]
    if not cases:
        parser.error(f"no case of {options.ranks} ranks has {options.only!r} in its line")
    for case in cases:
        sys.stdout.write(f"{launch(measure, (case, options.device), case.ranks, options.device)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
