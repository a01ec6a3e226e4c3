"""What ranks measured, beside the plain loop over stock transformers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engines.families.family import Family
from engines.families.registry import registered_family
from engines.private_api import set_experts
from engines.prove.comparison import Difference, Result, difference, largest
from engines.prove.engine_result import proof_weights
from engines.prove.generic_family import TextPartFamily, generic_family, is_inside
from engines.prove.plain_loop import PlainLoop
from engines.prove.rank_measurements import AFTER, BEFORE, RESUMED, STEPS, STOCK, Job, Measured

LOG_PROBS = 1e-4
"""Largest difference of a log-prob: float32 against float64."""


@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that count as equal."""

    gradients: float
    """Relative to a parameter's largest entry."""
    moves: float
    """Of what two steps moved, relative likewise: the second step begins with the first one's error."""
    metrics: float
    """Of loss and gradient norm."""
    rounding: float
    """Of a weight, that its dtype makes in two steps."""


FLOAT32 = Tolerances(1e-3, 1e-2, 1e-3, 2.0**-22)
NARROW = Tolerances(2e-2, 1e-1, 1e-2, 2.0**-7)
"""Of weights, gradients and moments in bfloat16, which has eight bits."""
MARGIN = 100.0
"""How many tolerances a planted error must move a log-prob."""


@dataclass
class Comparison:
    """The differences, what a planted error moved, and what is not equal."""

    difference: Difference
    numbers: dict[str, float] = field(default_factory=dict)
    leaks: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def compare(job: Job, measured: Measured) -> Comparison:
    """Compare the results of ranks, and the folders that they wrote, with stock transformers."""
    loop = _loop(job, measured)
    weights = proof_weights(job.rows)
    want, _ = loop.gradients(job.rows, weights)
    base = loop.merged()
    comparison = Comparison(difference(measured.result, want))
    curve = loop.train(job.rows, weights, job.adam, STEPS)
    for name in ("loss", "grad_norm"):
        pairs = [(a[name], b[name]) for a, b in zip(measured.curve, curve, strict=True)]
        comparison.numbers[name] = max(_relative(a, b) for a, b in pairs)
    trained = loop.merged()
    comparison.numbers["weights after two steps"], worst = _moved(job, base, trained)
    comparison.numbers["the checkpoint's last loss"] = _relative(measured.resumed["loss"], measured.curve[-1]["loss"])
    comparison.leaks["the first two sequences as one"] = _leak(job, measured, want)
    comparison.problems += _problems(comparison, worst, NARROW if job.adam.narrow else FLOAT32)
    comparison.problems += _of_files(job.folder)
    return comparison


def _loop(job: Job, measured: Measured) -> PlainLoop:
    model: Any = _load(job.folder / STOCK, attn_implementation="eager").double().eval()
    text = model.config.get_text_config()
    for config in (model.config, text):
        set_experts(config, "eager")  # grouped products take no float64
    family: Family = registered_family(model.config) or generic_family(model.config)
    if isinstance(family, TextPartFamily):
        own = family.trained(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in own)
    router = family.auxiliary_loss(model.config, job.config.router_aux_loss_coef, job.config.router_z_loss_coef)
    return PlainLoop(
        model, measured.adapters, job.config.lora.scale if measured.adapters else 0.0, router, family.router
    )


def _load(folder: Path, **options: Any) -> Any:
    """Return what stock transformers reads: a causal language model, or the whole of a multi-modal type."""
    whole = is_inside(AutoConfig.from_pretrained(folder))
    return (AutoModelForImageTextToText if whole else AutoModelForCausalLM).from_pretrained(folder, **options)


def _moved(job: Job, base: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> tuple[float, str]:
    """Return how far what the steps moved is from the plain loop's, of weights that stock transformers loads back."""
    weights = dict(_load(job.folder / AFTER).named_parameters())
    if weights.keys() != want.keys():
        return float("inf"), "their names"
    rounding = (NARROW if job.adam.narrow else FLOAT32).rounding
    floor = 1e-3 * max(largest(want[name] - base[name]) for name in want)
    worst, worst_name = 0.0, ""
    for name, value in want.items():
        wrong = largest(weights[name].detach().double() - value) - rounding * largest(value)
        if not (share := wrong / max(largest(value - base[name]), floor)) <= worst:
            worst, worst_name = share, name
    return worst, worst_name


def _leak(job: Job, measured: Measured, want: Result) -> float:
    """Return how far the second sequence's log-probs move where the engine gets the first two as one."""
    first, second = len(job.rows[0]), len(job.rows[1])
    return largest(measured.joined[first:].double() - want.log_probs[first - 1 : first + second - 2])


def _problems(comparison: Comparison, worst: str, allowed: Tolerances) -> Iterator[str]:
    """Yield what is not equal."""
    if not (comparison.difference.log_probs <= LOG_PROBS and comparison.difference.gradients <= allowed.gradients):
        yield f"ranks differ from stock transformers: {comparison.difference}"
    for name in ("loss", "grad_norm"):
        if not comparison.numbers[name] <= allowed.metrics:
            yield f"{name} of two steps differs by {comparison.numbers[name]:.1e} of a plain loop's"
    if not (moved := comparison.numbers["weights after two steps"]) <= allowed.moves:
        yield f"weights after two steps differ by {moved:.1e} of what a plain loop moved ({worst})"
    if (again := comparison.numbers["the checkpoint's last loss"]) > allowed.metrics:
        yield f"the loss after a checkpoint was loaded differs by {again:.1e}"
    for name, moved in comparison.leaks.items():
        if not moved >= MARGIN * LOG_PROBS:
            yield f"a planted error is not seen: {name} moves a log-prob by {moved:.1e}"


def _of_files(folder: Path) -> Iterator[str]:
    """Yield how an export differs from what stock transformers writes, and a resumed run's from the straight one's."""
    for what, one, other in (
        ("an export differs from what stock transformers writes", STOCK, BEFORE),
        ("weights after a checkpoint was loaded differ from those of the run that went on", AFTER, RESUMED),
    ):
        want, got = _tensors(folder / one), _tensors(folder / other)
        if (names := sorted(want.keys() ^ got.keys())) or (
            names := [name for name, value in want.items() if not _same_bits(value, got[name])]
        ):
            yield f"{what}: {', '.join(names[:3])}"


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def _relative(one: float, other: float) -> float:
    return abs(one - other) / max(abs(one), abs(other), 1e-30)
