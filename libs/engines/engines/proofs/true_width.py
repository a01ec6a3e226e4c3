"""Configs and models with one layer of each kind at the config's own width, as large as memory takes: for proofs on a
run's device. Of a multi-modal type whose text part is trained inside of the whole, the other parts are small.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engines.families.registry import checked_part
from engines.private_api import attention_function
from engines.prove.generic_family import is_inside
from engines.prove.lengths import proof_lengths
from engines.prove.proof import BUILD_ERRORS
from engines.prove.random_weights import randomize
from engines.prove.small_config import CHOSEN, EXPERTS, layer_kinds, thresholds
from engines.prove.small_towers import with_text
from engines.weights.empty_model import model_of

VALUES = 2**31
"""Most values of the weights: with gradients, moments and copies each takes about 24 bytes of a device."""
LOGITS = 2**30
"""Logits of one sequence that are in memory at once: longer ones are left out."""
SCORES = 2**30
"""Scores of all heads of one sequence."""
PLAIN_SCORES = 3 * 2**30
"""The same in float32 on an accelerator, whose attention of grouped heads makes them all for the plain result."""
HOST_VALUE, HOST_LOGIT = 36, 16
"""Bytes of a value and of a logit where the device's memory is the host's."""
INDEX = 2**31
"""Elements of a tensor that an index of 32 bits does not reach."""
LONGEST = 700
"""Length of the longest sequence where neither a threshold nor the run has a longer one."""


@dataclass(frozen=True)
class LayerSubset:
    """A config with one layer of each kind at its own width, and what memory takes of the lengths."""

    config: Any
    lengths: tuple[int, ...]
    """Lengths on both sides of its thresholds."""
    not_crossed: tuple[str, ...]
    """Fields whose threshold no such length exceeds, the run's longest row where memory takes none as long, and 2^31
    elements where an activation of the run's micro-batch has as many, and none of the proof's."""
    experts: Mapping[str, int] = field(default_factory=dict)
    """Numbers of experts, where they are fewer than the config's."""


def layer_subset(config: Any, device: torch.device, longest: int = 0, tokens: int = 0) -> LayerSubset:
    """Return a config with few layers for a device, and lengths up to `longest` and past its thresholds. `tokens`: of
    the run's micro-batch.

    Raises:
        ValueError: stock transformers cannot build it, no field says how many layers there are, or the host's memory
            is too small.
    """
    part, free = checked_part(config), free_host_memory() if device.type == "cpu" else None
    text, _ = layer_kinds(part)
    few = with_text(part, text) if is_inside(part) else text
    most = VALUES if free is None else min(VALUES, free // HOST_VALUE)
    try:
        experts = fit_experts(few, most)
        model = _meta(few)
    except BUILD_ERRORS as error:
        raise ValueError(
            f"{part.model_type} cannot be proven at true width: stock transformers could not build one layer of each "
            f"kind ({type(error).__name__}: {error})"
        ) from error
    logits, values = LOGITS, _values(model)
    if free is not None:
        if values > most:
            raise ValueError(
                f"layers of {part.model_type} at true width take about {HOST_VALUE * values / 1e9:.1f} GB of memory, "
                f"{free / 1e9:.1f} GB are free: leave prove='full' out, or prove it on another machine"
            )
        logits = min(LOGITS, (free - HOST_VALUE * values) // HOST_LOGIT)
    edges, fits = thresholds(text), longest_that_fits(model, logits, None if free is not None else PLAIN_SCORES)
    lengths = tuple(one for one in proof_lengths(edges, min(max(longest, LONGEST), fits)) if one <= fits)
    reached = max(lengths, default=0)
    wanted = {**edges, "the run's longest row": longest - 1}
    not_crossed = tuple(name for name, edge in wanted.items() if edge >= reached)
    if sum(lengths) * (each := widest(model)) < INDEX <= tokens * each:
        not_crossed += (f"2^31 elements: {tokens} tokens of {each} values",)
    return LayerSubset(few, lengths, not_crossed, experts)


def free_host_memory() -> int:
    """Return the bytes of host memory that are free or that the system would free."""
    match = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"), re.MULTILINE)
    return 1024 * int(match[1]) if match else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def longest_that_fits(model: Any, logits: int, scores: int | None) -> int:
    """Return the longest sequence whose logits fit memory, and whose scores do where stock attention makes them all."""
    text = model.config.get_text_config()
    most: int = logits // text.vocab_size
    if attention_function(model.config) == "eager":
        scores = SCORES
    return most if scores is None else min(most, math.isqrt(scores // text.num_attention_heads))


def widest(model: Any) -> int:
    """Return the most values of a token in what a layer computes: a linear layer's result, or those of the experts that
    it chooses. Logits are made of few tokens at a time."""
    text, head = model.config.get_text_config(), model.get_output_embeddings()
    chosen = max((value for name in CHOSEN if isinstance(value := getattr(text, name, None), int)), default=1)
    linear = [one.out_features for one in model.modules() if isinstance(one, nn.Linear) and one is not head]
    stacked = [chosen * max(one.shape[1:]) for one in model.parameters() if one.dim() == 3]
    most: int = max([text.hidden_size, *linear, *stacked])
    return most


def fit_experts(config: Any, values: int) -> dict[str, int]:
    """Reduce the experts of a config in place, by halves, until its weights have at most so many values.

    Return what was changed. Experts stay a multiple of the groups, and more than a token chooses.
    """
    text, changed = config.get_text_config(), dict[str, int]()
    names = [name for name in EXPERTS if isinstance(getattr(text, name, None), int)]
    chosen = max((value for name in CHOSEN if isinstance(value := getattr(text, name, None), int)), default=1)
    while _values(_meta(config)) > values:
        halves = {name: getattr(text, name) // 2 for name in names}
        if not halves or min(halves.values()) < 2 * max(chosen, getattr(text, "n_group", None) or 1):
            break
        for name, half in halves.items():
            setattr(text, name, half)
        changed |= halves
    return changed


def true_width(config: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Return a float32 model on the device with random weights that `dtype` can hold."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        model: Any = model_of(config, is_inside(config)).to(torch.float32).eval()
    randomize(model, generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


@contextmanager
def exact_products() -> Iterator[None]:
    """Keep float32 products exact while this is open: no TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _meta(config: Any) -> Any:
    with torch.device("meta"):
        return model_of(config, is_inside(config))


def _values(model: Any) -> int:
    """Return how many values the weights of a model have."""
    return sum(parameter.numel() for parameter in model.parameters())
