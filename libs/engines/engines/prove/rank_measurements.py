"""What the ranks of a proof of options measure, through an engine's public methods alone."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from engines.adapters.adapter_export import adapter_pieces
from engines.backends import TRAIN_BACKENDS
from engines.config import EngineConfig
from engines.families.registry import admitted, checked_part, registered_family
from engines.protocol import TrainEngine
from engines.prove.comparison import Result
from engines.prove.engine_result import (
    RATE,
    WeightedSum,
    engine_log_probs,
    engine_result,
    live_weights,
    proof_batch,
    settings_of_proof,
)
from engines.prove.generic_family import generic_family
from engines.prove.plain_loop import Adam

STEPS = 2
NARROW = 1e6
"""Factor of the learning rate where weights are kept in bfloat16: what a step moves is then far above the weights, and
so has the gradient's digits."""
STOCK = "stock"
"""Folder of the stock model."""
BEFORE, AFTER, RESUMED, CHECKPOINT = "before", "after", "resumed", "checkpoint"
"""Folders that the ranks write: exports before and after the steps and of the resumed run, and its checkpoint."""
Plant = Callable[[Any], None]
"""A function that makes an error in a new engine on each rank."""


@dataclass(frozen=True)
class Job:
    """What every rank gets."""

    config: EngineConfig
    """The run's options on the layout in small."""
    folder: Path
    """A folder with the stock model in `stock`; results are written beside it."""
    rows: Sequence[Tensor]
    adam: Adam


@dataclass(frozen=True)
class Measured:
    """What rank 0 returns."""

    result: Result
    joined: Tensor
    """Log-probs of the first two sequences as one: an error that is planted."""
    adapters: Mapping[str, Tensor]
    """First values of the adapters."""
    curve: Sequence[Mapping[str, float]]
    resumed: Mapping[str, float]
    """Metrics of the last step of the run that read the checkpoint of the step before."""


def measure(job: Job, plant: Plant | None = None) -> Measured:
    """Measure on every rank; rank 0's answer counts. Collective."""
    directory = job.folder / STOCK
    torch.backends.cudnn.allow_tf32 = False  # of a process of the proof's own
    part = checked_part(AutoConfig.from_pretrained(directory))
    with admitted(part, registered_family(part) or generic_family(part)):
        adapters, joined, result = _first_step(job, plant)
        curve, resumed = _steps(job, plant)
    return Measured(result, joined, adapters, curve, resumed)


def _build(config: EngineConfig, job: Job, plant: Plant | None) -> TrainEngine:
    torch.manual_seed(0)  # of adapters
    made = replace(config, model=str(job.folder / STOCK))
    engine: TrainEngine = resolve_name(TRAIN_BACKENDS[config.backend].builder)(made, None, True)
    if plant is not None:
        plant(engine)
    return engine


def _release(config: EngineConfig) -> None:
    if config.backend == "megatron":
        resolve_name("engines.megatron.runtime.process_groups:release")()


def _first_step(job: Job, plant: Plant | None) -> tuple[dict[str, Tensor], Tensor, Result]:
    """Return first values of adapters, log-probs of two sequences as one, and log-probs with gradients."""
    changes = {"lr": RATE * NARROW, "master_dtype": "bfloat16"} if job.adam.narrow else {}
    engine = _build(settings_of_proof(job.config, **changes), job, plant)
    engine.save_hf(job.folder / BEFORE)
    adapters = adapter_weights(engine) if job.config.lora.rank else {}
    joined = engine_log_probs(engine, [torch.cat([*job.rows[:2]])])
    read = adapter_weights if adapters else live_weights
    result = engine_result(engine, job.rows, read, NARROW if job.adam.narrow else 1.0)
    _release(job.config)
    return adapters, joined, result


def _steps(job: Job, plant: Plant | None) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return the metrics of the steps, and of the last one again, from the checkpoint before it."""
    adam = {name: value for name, value in vars(job.adam).items() if name != "narrow"}
    settings = settings_of_proof(job.config, **adam, master_dtype=job.config.master_dtype)
    batch = proof_batch(job.rows)
    engine, curve = _build(settings, job, plant), []
    for step in range(STEPS):
        if step == STEPS - 1:
            engine.save(job.folder / CHECKPOINT)
        curve.append(engine.train_batch(batch, WeightedSum()))
    engine.save_hf(job.folder / AFTER)
    other = _build(settings, job, None)
    other.load(job.folder / CHECKPOINT)
    resumed = other.train_batch(batch, WeightedSum())
    other.save_hf(job.folder / RESUMED)
    _release(job.config)
    return curve, resumed


def adapter_weights(engine: Any) -> dict[str, Tensor]:
    """Return the matrices of the adapters by LAYER.lora_A and LAYER.lora_B, whole, on the host. Collective."""
    return {
        piece.name: piece.flat.to("cpu", copy=True).view(piece.shape)
        for piece in adapter_pieces(engine, live=True, max_bytes=2**62)
    }
