"""Hold a model type to stock transformers before it is trained: one layer of each kind, in small, in float64.

1. `shrink_config` makes the config small. Every switch keeps its value, every threshold lies between the lengths.
2. Packed rows are compared with stock transformers, one sequence at a time: log-probs, and the gradient of every
   parameter. No value is as it was initialised, and matrices are larger, so that a leak shows.
   So are padded rows, which a run with `batching='padded'` computes. A parameter that no sequence reaches fails.
   Log-probs within `RETRY_LIMIT` are compared once more with `KeepFloat64`: what float32 rounds in parts of stock
   layers, some weights enlarge.
3. Errors are planted: the first two sequences as one, to all layers and to each kind of layer alone. Each must move a
   log-prob by `MARGIN` times the tolerance.
4. Every config field is changed in stock transformers. One that moves no log-prob as far, although the modelling code
   names it, is not exercised: what it does was not compared.

A proof does not show that stock transformers is right, that training converges, or what other kernels compute.
"""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from engines.families.registry import admitted, checked_part, digest, registered_family
from engines.inputs.model_inputs import PackedInputs, PaddedInputs
from engines.private_api import attention_function, set_experts
from engines.prove.certificate import Certificate, place, versions
from engines.prove.comparison import (
    Difference,
    Result,
    chosen_log_probs,
    difference,
    largest,
    packed_layers,
    scored,
    sequences,
    stock,
)
from engines.prove.float64 import KeepFloat64
from engines.prove.generic_family import OTHER_TOKENS, GenericFamily, TextPartFamily, generic_family, is_inside
from engines.prove.lengths import proof_lengths
from engines.prove.random_weights import randomize
from engines.prove.sensitivity import MergedOps, SeenOps, flips, largest_move, of_absent_layers
from engines.prove.small_config import VOCABULARY, shrink_config, thresholds
from engines.prove.small_towers import shrink_whole
from engines.prove.text_part import export_problem, separate
from engines.weights.empty_model import model_of

LOG_PROBS = 3e-5
"""Largest difference of a log-prob that counts as equal: parts of stock layers compute in float32."""
RETRY_LIMIT = 10 * LOG_PROBS
GRADIENTS = 1e-3
MARGIN = 100.0
"""How many tolerances a planted error must move a log-prob."""
INFINITE = float("inf")
_OTHER_MEDIA = re.compile(r"(^|\.)(image|audio|vision|visual|speech)_")
"""Parts of a model for images and sounds: on text alone none is called, and their config fields need a name."""
BUILD_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)
"""What modelling code raises for sizes that do not fit together."""


def prove(config: Any) -> Certificate:
    """Prove a transformers config; the certificate says what was equal, and `problems` what was not.

    Raises:
        ValueError: the type has no causal language model, or none could be built in small.
    """
    start, part = time.perf_counter(), checked_part(config)
    if not hasattr(part.get_text_config(), "vocab_size"):
        raise ValueError(
            f"model family {part.model_type!r} is not supported: its config has no vocab_size, so that it "
            "writes no text"
        )
    family = registered_family(part) or generic_family(part)
    try:
        small = small_config(part)
        model = random_model(small)
        lengths = proof_lengths(thresholds(small))
        rows = sequences(lengths, min(VOCABULARY, small.get_text_config().vocab_size))
        want = stock(model, rows)
        problem = _looks_ahead(model, rows)
        if digest(model.config) != digest(small):
            problem = problem or "its class changes the config that it is given: what is opened is not what was proven"
        if isinstance(family, TextPartFamily):
            problem = problem or separate(model, family, want)
        problem = problem or _unreached(model, rows, want)
    except BUILD_ERRORS as error:
        raise ValueError(
            f"model family {part.model_type!r} is not supported: no proof could be made, as stock transformers could "
            f"not run its config in small on text alone ({type(error).__name__}: {error})"
        ) from error
    got, padded, planted, possible = Difference(INFINITE, INFINITE), None, {}, not problem
    with admitted(small, family):
        if possible:
            got, problem = _packed(model, rows, want)
            if LOG_PROBS < got.log_probs <= RETRY_LIMIT:
                with KeepFloat64():
                    got, problem = _packed(model, rows, stock(model, rows))
            planted = {} if problem else _planted(model, rows, want)
    if weak := [name for name, moved in planted.items() if moved < MARGIN * LOG_PROBS]:
        problem = f"planted errors are not seen: {', '.join(weak)}"
    with admitted(small, replace(family, packs=not problem)):
        if possible:
            padded = _padded(model, rows, want)
        equal = possible and not (problem and padded == INFINITE)
        if equal and isinstance(family, GenericFamily) and (wrong := export_problem(model, family, rows, want)):
            problem, padded, equal = "; ".join(filter(None, [problem, wrong])), INFINITE, False
    changes = list(flips(small, model, rows, want, MARGIN * LOG_PROBS)) if equal else []
    moved = {one.field: one.moved for one in changes if one.moved > LOG_PROBS or not of_absent_layers(small, one.field)}
    unseen = tuple(name for name, most in moved.items() if not most > MARGIN * LOG_PROBS)
    planted |= {f"config field {name}": most for name, most in moved.items() if name not in unseen and most < INFINITE}
    return Certificate(
        part.model_type, digest(part), "small", lengths, got.log_probs, got.gradients, padded, planted, unseen,
        (problem,) if problem else (), time.perf_counter() - start, versions(), place=place(),
    )  # fmt: skip


def small_config(text: Any) -> Any:
    """Return the config in small, with experts that take float64 (grouped products do not)."""
    small = shrink_whole(text) if text.sub_configs else shrink_config(text).config
    for part in {id(one): one for one in (small, small.get_text_config())}.values():
        set_experts(part, "eager")
    return small


def random_model(config: Any, seed: int = 0) -> nn.Module:
    """Return a float64 model in evaluation mode with random weights (`randomize`)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = is_inside(config)
        model: nn.Module = model_of(config, whole, attn_implementation="eager").to(torch.float64).eval()
    randomize(model, generator)
    return model


def _looks_ahead(model: Any, rows: Sequence[Tensor]) -> str:
    """Return what is wrong where stock transformers lets a token see those behind it, by any of its attentions.

    Without `token_type_ids` PaliGemma's eager attention is causal, and its other one is not.
    """
    ids = rows[1].clone()
    ids[-1] = ids[-1] % 8 + 3 if ids[-1] > 10 else ids[-1] + 1
    for name in ("sdpa", "eager"):  # the second stays
        try:
            model.set_attn_implementation(name)
        except ValueError:
            continue  # the type has no such attention
        with torch.no_grad():
            one, other = (chosen_log_probs(model, row)[:-1] for row in (rows[1], ids))
        if (moved := largest(one - other)) > LOG_PROBS:
            model.set_attn_implementation("eager")
            return f"it is no causal model: a later token moves an earlier log-prob by {moved:.1e} ({name} attention)"
    return ""


def _unreached(model: Any, rows: Sequence[Tensor], want: Result) -> str:
    """Return what is wrong where a trained parameter moves no log-prob of stock transformers: as no sequence is long
    enough, or what it belongs to is never called."""
    parts = [name for name, part in model.named_modules() if "CrossAttention" in type(part).__name__]
    others = tuple(f"{name}." for name in parts)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or bool(want.gradients[name].any()):
            continue
        if name.startswith(others) or OTHER_TOKENS.search(name) or _OTHER_MEDIA.search(name):
            continue
        with torch.no_grad():
            before = parameter.clone()
            parameter.mul_(-3)  # a choice of keys, without gradients, is another
            moved = largest_move(model, rows, want, LOG_PROBS)
            parameter.copy_(before)
        if not moved > LOG_PROBS:
            return f"no sequence of the proof reaches {name}: nothing was compared of it"
    return ""


def _packed(model: Any, rows: Sequence[Tensor], want: Result) -> tuple[Difference, str]:
    """Return how far packed rows are from stock transformers, and what is wrong with them."""
    try:
        with packed_layers(model):
            got = difference(scored(model, rows, PackedInputs()), want)
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return Difference(INFINITE, INFINITE), f"packed rows cannot be computed: {error}"
    equal = got.log_probs <= LOG_PROBS and got.gradients <= GRADIENTS
    return got, "" if equal else f"packed rows differ from stock transformers: {got}"


def _padded(model: Any, rows: Sequence[Tensor], want: Result) -> float:
    """Return the largest difference of a log-prob of padded rows from stock transformers; infinite where not equal.

    By the attention that a run computes with: eager ones can make NaN of padding behind a window.
    """
    before = attention_function(model.config)
    with suppress(ValueError):  # the type has no such attention
        model.set_attn_implementation("sdpa")
    try:
        got = difference(scored(model, rows, PaddedInputs()), want)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return INFINITE
    finally:
        model.set_attn_implementation(before)
    return got.log_probs if got.log_probs <= LOG_PROBS and got.gradients <= GRADIENTS else INFINITE


def _planted(model: Any, rows: Sequence[Tensor], want: Result) -> dict[str, float]:
    """Return how far each planted error moves a log-prob."""
    seen: dict[Any, None] = {}
    with packed_layers(model):
        scored(model, rows, PackedInputs(SeenOps(seen=seen)), gradients=False)
        moved = {}
        for kind in seen:
            name = kind if isinstance(kind, str) else _attention_name(*kind)
            got = scored(model, rows, PackedInputs(MergedOps(kind=kind)), gradients=False)
            moved[f"leak in {name}"] = largest(got.log_probs - want.log_probs)
    return moved


def _attention_name(kind: str, window: int | None, chunk: int | None) -> str:
    return f"{kind}, window {window}" if window is not None else f"{kind}, chunk {chunk}" if chunk is not None else kind
