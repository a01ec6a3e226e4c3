"""Hold the options of a run together to stock transformers: on ranks of the CPU, or with `prove="full"` of the run's
devices, with a small random model of its config.

1. The layout is made small (`small_layout`): each degree above one becomes two.
2. Ranks forked from one server build an engine with these options (`engines.prove.rank_measurements`): log-probs,
   gradients, two steps, exports, a checkpoint.
3. A plain loop over stock transformers in float64 does the same, one sequence at a time (`engines.prove.plain_loop`).

A proof does not show what another device, dtype or number of ranks computes.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from engines.capability import untested_transformer_options, without_deepep
from engines.config import EngineConfig, parse_context_parallel, parse_options
from engines.devices.detect import devices_of
from engines.families.registry import checked_part, digest
from engines.launch import RankError
from engines.parallel.configured_layout import layout_of
from engines.parallel.layout import ParallelLayout
from engines.prove.certificate import Certificate, place, versions
from engines.prove.comparison import Difference, sequences
from engines.prove.forked_ranks import last_line, launch_forked
from engines.prove.lengths import proof_lengths
from engines.prove.options_comparison import Comparison, compare
from engines.prove.plain_loop import Adam
from engines.prove.proof import BUILD_ERRORS, INFINITE, random_model, small_config
from engines.prove.rank_measurements import STOCK, Job, Plant, measure
from engines.prove.small_config import VOCABULARY, thresholds

RANKS = (1, 2, 4, 8)
MOST = 4
"""Ranks of a proof that keeps data parallelism."""
SHRUNK = (
    *("tensor_parallel", "pipeline_parallel", "virtual_pipeline_parallel"),
    *("expert_parallel", "expert_tensor_parallel"),
)
DIED = "died with exit code"
"""Of a rank's error that says nothing of the options."""
ENDS = ("first_stage_layers", "last_stage_layers")
NOT_COMPARED = frozenset(
    [
        *("model", "device", "npu_operators", "max_tokens_per_rank", "dtype", "compile", "temperature", "logit_chunk"),
        *("collective_timeout_seconds", "lr", "learning_rates", "lr_schedule", "warmup_steps", "total_steps", "eps"),
        *("min_lr_ratio", "weight_decay", "grad_clip", "prove", "allow_untested", "on_nonfinite"),
        *("family", "family_options"),
        *("skip_zero_gradient_rows", "recheck_every", "recheck_rows", "recheck_tokens", "recheck_bound"),
    ]
)
"""Fields that a proof of options sets itself, or that no other option's code reads."""


@dataclass(frozen=True)
class SmallLayout:
    """The run's options on few CPU ranks."""

    config: EngineConfig
    ranks: int


def small_layout(config: EngineConfig, world_size: int) -> SmallLayout:
    """Return the options with each degree above one as two, on the fewest ranks that hold them.

    Data parallelism, and that of experts, is kept where four ranks hold it. ValueError where eight ranks do not hold
    the layout.
    """
    given, small = layout_of(config, world_size), _small(config)
    copies = 1 if config.shard_ranks is None else min(2, world_size // config.shard_ranks)
    possible = []
    for ranks in RANKS:
        try:
            layout = layout_of(small, ranks)
        except ValueError:
            continue
        if ranks >= copies * (small.shard_ranks or 1):
            possible.append(ranks)
            split = all(min(2, of) <= here for of, here in zip(_replicas(given), _replicas(layout), strict=True))
            if split and ranks <= MOST:
                possible = [ranks]
                break
    if not possible:
        raise ValueError(f"no layout of at most {RANKS[-1]} ranks holds these options in small: {small}")
    if small.device != "cpu" and (there := _devices_here(small.device)) < possible[0]:
        without = ": set prove to 'cached' for one on the CPU" if config.prove == "full" else ""
        raise ValueError(
            f"a proof of these options needs {possible[0]} {small.device} devices, this machine has {there}{without}"
        )
    return SmallLayout(small, possible[0])


def _devices_here(device: str) -> int:
    missing = devices_of(device).missing() is not None
    return 0 if missing else torch.get_device_module(device).device_count()


def _small(config: EngineConfig) -> EngineConfig:
    sizes: dict[str, Any] = {name: min(2, getattr(config, name)) for name in SHRUNK}
    if parse_context_parallel(config.context_parallel) not in (1, "dynamic"):
        sizes["context_parallel"] = "static:2"
    if uneven := next((name for name in ENDS if getattr(config, name) is not None), None):
        sizes |= {**dict.fromkeys(ENDS), uneven: sizes["virtual_pipeline_parallel"]}
    if config.shard_ranks is not None:
        sizes["shard_ranks"] = min(2, config.shard_ranks)
    # The host, but for what moves between it and the run's device, may choose kernels, or is asked for there.
    own = config.parameters_on_host or config.prove == "full" or untested_transformer_options(config)
    device = devices_of(config.device).kind if own else "cpu"
    sizes |= {"model": None, "device": device, "vision": "off", "learning_rates": ()}
    return replace(without_deepep(config), **sizes, dtype="float32", compile="off")


def _replicas(layout: ParallelLayout) -> tuple[int, int]:
    """Return how many ranks hold copies (or shares, under FSDP2) of a layer's weights, and of an expert's."""
    return layout.dp, layout.dp * layout.cp * layout.tp // (layout.ep * layout.etp)


def prove_options(
    config: EngineConfig, model: Any, world_size: int, seconds: float | None = None, plant: Plant | None = None
) -> Certificate:
    """Prove the options of a run together; the certificate's `problems` say what was not equal.

    Args:
        config: the run's settings.
        model: the transformers config of its model; its text part is proven, inside of the whole if that is trained so.
        world_size: number of the run's ranks.
        seconds: how long the ranks may take; a proof that takes longer does not hold.
        plant: makes an error in each engine, on each rank.

    Raises:
        ValueError: the type has no causal language model, none could be built in small, no few ranks hold the
            layout, or they took too long.
    """
    start, part, layout = time.perf_counter(), checked_part(model), small_layout(config, world_size)
    narrow = config.master_dtype == "bfloat16"
    if untested_transformer_options(config):
        from engines.megatron.config.transformer_options import checked_options  # megatron-core may be absent

        checked_options(parse_options(config.transformer_options))
    try:
        small = small_config(part)
        _deepen(small.get_text_config(), layout.config)
        module: Any = random_model(small).to(torch.float32)
        if narrow:  # values that it can hold, in files of float32
            module = module.to(torch.bfloat16).to(torch.float32)
    except BUILD_ERRORS as error:
        raise ValueError(
            f"{part.model_type} cannot be proven: stock transformers could not build its config in small "
            f"({type(error).__name__}: {error})"
        ) from error
    lengths = proof_lengths(thresholds(small))
    rows = sequences(lengths, min(VOCABULARY, small.get_text_config().vocab_size))
    settings = replace(layout.config, max_tokens_per_rank=max(2 * max(lengths), sum(lengths) // 3))
    adam = Adam(lr=0.03, betas=config.betas, eps=1.0, weight_decay=0.1, grad_clip=1.0, narrow=narrow)
    comparison = Comparison(Difference(INFINITE, INFINITE))
    with tempfile.TemporaryDirectory(prefix="proof_") as name, _without_progress():
        folder = Path(name)
        module.save_pretrained(folder / STOCK)
        try:
            job, megatron = Job(settings, folder, rows, adam), config.backend == "megatron"
            measured = launch_forked(
                measure, (job, plant), layout.ranks, settings.device, seconds, within_seconds=seconds, megatron=megatron
            )
            comparison = compare(job, measured)
        except (RankError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or DIED in str(error):
                raise ValueError(
                    f"these options could not be proven ({error}): try `python -m engines prove` before the run"
                ) from error
            comparison.problems.append(last_line(str(error)))
    return Certificate(
        part.model_type, digest(part), "small", lengths, comparison.difference.log_probs,
        comparison.difference.gradients, None, comparison.leaks, (), tuple(comparison.problems),
        time.perf_counter() - start, versions(), "options",
        {**compared_options(settings), "ranks": layout.ranks}, None, place(settings.device), comparison.numbers,
    )  # fmt: skip


@contextmanager
def _without_progress() -> Iterator[None]:
    """Show no progress of small models that are written and read while this is open."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def compared_options(config: EngineConfig) -> dict[str, Any]:
    """Return the fields that differ from their defaults, without those that a proof of options does not cover."""
    plain = asdict(EngineConfig())
    return {
        field.name: value
        for field in fields(config)
        if (value := asdict(config)[field.name]) != plain[field.name] and field.name not in NOT_COMPARED
    }


def _deepen(small: Any, config: EngineConfig) -> None:
    """Give the small text config as many layers, repeated in order, as the stages of a pipeline need."""
    stages, chunks = config.pipeline_parallel, config.virtual_pipeline_parallel
    if stages == 1:
        return
    uneven = any(getattr(config, name) is not None for name in ENDS)
    before = small.num_hidden_layers
    depth = (stages + uneven) * chunks
    depth *= 1 if uneven else -(-before // depth)
    for name, value in small.to_dict().items():
        if isinstance(value, list) and len(value) == before:
            setattr(small, name, [value[layer % before] for layer in range(depth)])
    small.num_hidden_layers = depth
