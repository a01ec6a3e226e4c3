"""Hold the run's own device, dtype and kernels to stock transformers: layers at true width, in the engine's own step.

1. `layer_kinds` keeps one layer of each kind, with all other sizes. Experts are fewer where memory is short.
2. The plain result: stock transformers in float32 without TF32, its delta nets in plain torch, one sequence at a time.
3. Stock transformers in the run's dtype, with the kernels that it picks: its error is the measure.
4. The engine as the run configures it: its own layers, kernels and scorer, log-probs and the gradient of every weight.
   Its error may be `RATIO` times that of stock.
5. The first two sequences as one must exceed what is allowed: else the comparison would not see a leak.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.build import build_engine
from engines.capability import without_deepep
from engines.config import EngineConfig
from engines.families.registry import admitted, checked_part, digest, registered_family
from engines.families.torch_operations import choose_torch_operations
from engines.launch import RankError, RankRefusedError
from engines.loading import cast_parameters, compute_dtype, resolve_device
from engines.proofs.true_width import LONGEST, exact_products, layer_subset, true_width
from engines.prove.certificate import Certificate, cached_at, place, versions
from engines.prove.comparison import Result, largest, sequences, stock
from engines.prove.engine_result import engine_log_probs, engine_result, settings_of_proof
from engines.prove.forked_ranks import last_line, launch_forked
from engines.prove.generic_family import generic_family
from engines.prove.options_admission import engine_code

RATIO = 1.5
"""How many times the error of stock transformers, as a root mean square, the engine's may be."""
WORST = 3.0
"""The same of a short sequence, whose errors are few numbers."""
GRADIENT = 6.0
"""The same of a single parameter's gradient, whose rounding is of one draw."""
SCALE = 0.4
"""How far a part of a gradient may be from its size, or `RATIO` times as far as stock's: rounding turns it, and hardly
scales it."""
PARTS, PART = 8, 256
"""Parts of a parameter at most, and values of one at least."""
FLOOR = 1e-4
"""Errors that count as none: float32's own, of which stock transformers has none here (on a CPU gradients of delta nets
differ by 2e-5)."""
MARGIN = 10.0
"""How many times stock's error a leak must be: in bfloat16, log-probs of unrelated tokens differ by no more."""
HIDDEN = "a leak moves log-probs"
DRAWS = 3
"""Draws of values at most: where a router of few experts chooses others in bfloat16, errors of one draw may hide a
leak."""
OPTIONS = ("backend", "batching", "compile", "dtype", "gradient_checkpointing", "weights", "transformer_options")
"""Fields that choose kernels."""
SINGLE = {
    **dict.fromkeys(("tensor_parallel", "pipeline_parallel", "virtual_pipeline_parallel", "expert_parallel"), 1),
    **dict.fromkeys(("shard_ranks", "first_stage_layers", "last_stage_layers"), None),
    "expert_tensor_parallel": 1,
    "context_parallel": "off",
    "routing_replay": False,
    "router_aux_loss_coef": None,
    "router_z_loss_coef": 0.0,
    "router_forwards_ahead": None,
    "vision": "off",
}
"""Fields of a configuration for one rank and text; what spans ranks is proven on ranks (`engines.prove.options`)."""


@dataclass(frozen=True)
class Errors:
    """Errors of one result against the plain one."""

    log_probs: Tensor
    """The root mean square by sequence, f64[n]; those of one token have none."""
    whole: float
    """The root mean square over all tokens."""
    gradients: Mapping[str, float]
    """Of each parameter, relative to the norm of its plain gradient."""
    scales: Mapping[str, float]
    """How far the worst part of a parameter's gradient is from the size of its plain one, along that."""


def prove_device(config: EngineConfig, model: Any, longest: int = 0, seed: int = 0) -> Certificate:
    """Prove a transformers config on the device of this process, as `config` asks for it, on one rank.

    `longest`: the longest row of the run; sequences as long are compared where their logits fit memory. `seed`: of
    random weights and tokens. The certificate's `not_exercised` are thresholds that no sequence exceeds for want of
    memory, and the longest row likewise.

    Values are drawn again where a leak would not show in them; what else does not hold is told at once.

    Raises:
        ValueError: stock transformers could not build it, or memory is too small.
    """
    for draw in range(DRAWS):
        certificate = _of_one_draw(config, model, longest, seed + draw)
        if len(certificate.problems) != 1 or not certificate.problems[0].startswith(HIDDEN):
            break
    return certificate


def _of_one_draw(config: EngineConfig, model: Any, longest: int, seed: int) -> Certificate:
    start, part = time.perf_counter(), checked_part(model)
    settings = settings_of_proof(without_deepep(config), **SINGLE)
    device = resolve_device(settings)
    dtype = compute_dtype(settings, device)
    few = layer_subset(part, device, longest, settings.max_tokens_per_rank or 0)
    lengths, family = few.lengths, registered_family(few.config) or generic_family(few.config)
    with admitted(few.config, family), exact_products():
        module = true_width(few.config, device, dtype, seed)
        rows = [row.to(device) for row in sequences(lengths, few.config.get_text_config().vocab_size, seed)]
        plain = _on_host(_plain(module, rows))
        own = _on_host(stock(cast_parameters(module, dtype), rows))
        allowed, farthest = errors(own, plain, lengths, device), largest(own.log_probs - plain.log_probs)
        del own
        family.reduce(module)
        settings = replace(settings, max_tokens_per_rank=max(settings.max_tokens_per_rank or 0, sum(lengths)))
        engine = build_engine(settings, cast_parameters(module, torch.float32))
        leak = _leak(engine, rows, plain)
        got = engine_result(engine, rows)
    ours = errors(got, plain, lengths, device)
    problems = [*_problems(ours, allowed)]
    if leak < MARGIN * (bound := allowed.whole + FLOOR):
        problems.append(f"{HIDDEN} by {leak:.1e}, less than {MARGIN} times the error {bound:.1e}")
    options = {name: value for name, value in asdict(settings).items() if name in OPTIONS}
    return Certificate(
        part.model_type, digest(part), "true", lengths,
        largest(got.log_probs - plain.log_probs), max(ours.gradients.values(), default=0.0), None,
        {"leak in all layers": leak}, few.not_crossed, tuple(problems), time.perf_counter() - start, versions(),
        "device", {**options, **few.experts}, farthest, place(device),
    )  # fmt: skip


def _plain(model: Any, rows: Sequence[Tensor]) -> Result:
    """Return the stock model's result by plain operations, one sequence at a time."""
    changed = choose_torch_operations(model, all_devices=True)
    try:
        return stock(model, rows)
    finally:
        changed.undo()


def _leak(engine: Any, rows: Sequence[Tensor], plain: Result) -> float:
    """Return the root mean square error of the second sequence where the engine gets the first two as one."""
    first, second = rows[0].numel(), rows[1].numel()
    joined = engine_log_probs(engine, [torch.cat([rows[0], rows[1]])])
    want = plain.log_probs[first - 1 : first + second - 2]
    return float((joined[first:].double() - want).square().mean().sqrt())


def errors(got: Result, plain: Result, lengths: Sequence[int], device: torch.device) -> Errors:
    """Return the errors of a result against the plain one; the device computes them."""
    squares = (got.log_probs.double() - plain.log_probs.double()).square()
    parts = [part for part in squares.split([length - 1 for length in lengths]) if part.numel()]
    gradients, scales = {}, {}
    for name, grad in plain.gradients.items():
        want = grad.to(device)
        if name in got.gradients and (norm := float(want.norm())):
            own = got.gradients[name].to(device)
            gradients[name] = float((own - want).norm()) / norm
            scales[name] = _scale(own, want)
    roots = torch.stack([part.mean().sqrt() for part in parts])
    return Errors(roots, float(squares.mean().sqrt()), gradients, scales)


def _scale(got: Tensor, want: Tensor) -> float:
    """Return how far the worst part of a gradient is from the size of the plain one; parts that are near zero do not
    count."""
    parts = max(1, min(PARTS, want.numel() // PART))
    pairs = [*zip(got.double().flatten().chunk(parts), want.double().flatten().chunk(parts), strict=True)]
    least = 0.1 * max(float(one.square().sum()) for _, one in pairs)
    sizes = [(float((a * b).sum()), float(b.square().sum())) for a, b in pairs]
    return max(abs(product / size - 1) for product, size in sizes if size >= least)


def _problems(ours: Errors, allowed: Errors) -> Iterator[str]:
    """Yield what is further from the plain result than stock transformers in the same dtype."""
    if not ours.whole <= RATIO * allowed.whole + FLOOR:
        yield f"log-probs differ by {ours.whole:.1e}, stock transformers' by {allowed.whole:.1e}"
    most = WORST * float(allowed.log_probs.max()) + FLOOR
    for number, value in enumerate(ours.log_probs.tolist()):
        if not value <= most:
            yield f"log-probs of sequence {number} differ by {value:.1e}, stock transformers' by {most / WORST:.1e}"
    typical = sorted(allowed.gradients.values())[len(allowed.gradients) // 2] if allowed.gradients else 0.0
    for name, value in allowed.gradients.items():
        if name not in ours.gradients:
            yield f"{name} has no gradient"
        elif not ours.gradients[name] <= GRADIENT * max(value, typical) + FLOOR:
            yield f"the gradient of {name} differs by {ours.gradients[name]:.1e}, stock transformers' by {value:.1e}"
        elif not ours.scales[name] <= max(SCALE, RATIO * allowed.scales[name]):
            yield f"the gradient of {name} is larger or smaller by {ours.scales[name]:.2f} of its size"


def _on_host(result: Result) -> Result:
    return Result(result.log_probs.cpu(), {name: grad.cpu() for name, grad in result.gradients.items()})


def device_certificate(config: EngineConfig, model: Any, longest: int = 0) -> Certificate:
    """Return the certificate of a config on the device that an engine of it would run on: from the cache unless
    `config.prove` is "always", else made in a process of its own, which gives the device's memory back.

    Raises:
        ValueError: no proof could be made there.
    """
    try:
        certificate: Certificate = launch_forked(_certificate_here, (config, model, longest), 1, config.device)
    except RankRefusedError:
        raise
    except RankError as error:  # memory ran out, a kernel failed
        raise ValueError(
            f"{model.model_type} could not be proven at true width on {config.device}: {last_line(str(error))}"
        ) from error
    return certificate


def device_path(config: EngineConfig, model: Any, device: torch.device, longest: int = 0) -> Path:
    """Return where the certificate is kept of a config on this device."""
    options = {name: value for name, value in asdict(config).items() if name in OPTIONS}
    return cached_at(
        model, "device", {**options, **place(device), "longest": max(longest, LONGEST), "code": engine_code()}
    )


def _certificate_here(config: EngineConfig, model: Any, longest: int) -> Certificate:
    device = resolve_device(config)
    if device.type == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))  # it is alone
    path = device_path(config, model, device, longest)
    if config.prove != "always" and path.is_file():
        return Certificate.load(path)
    certificate = prove_device(config, model, longest)
    certificate.save(path)
    return certificate
