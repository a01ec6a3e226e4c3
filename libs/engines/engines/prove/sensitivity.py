"""Errors that are planted to see that a proof would notice them: leaks between sequences, dropped boundaries, config
fields that the packed path would not honour."""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from engines.families.unread_fields import other_names
from engines.private_api import experts_of, set_experts
from engines.prove.comparison import Result, largest, stock
from engines.prove.generic_family import is_inside
from engines.prove.modeling_code import modeling_code
from engines.prove.small_config import SIZES
from engines.weights.empty_model import empty_model, model_of
from seqpack.adapters.context import Activation, LocalOps, PackedContext

IGNORED = re.compile(
    r"dropout|pdrop|layerdrop|initializer|init_std|w_init_|linear_a_log_|linear_dt_|use_cache|output_|return_dict|_token_id|token_id$|id2label|label2id|"
    r"problem_type|transformers_version|_name_or_path|architectures|dtype|model_type|chunk_size_feed_forward|"
    r"is_encoder_decoder|pretraining_tp|max_position_embeddings|^max_seq_len$|tie_word_embeddings|jitter|aux_loss|z_loss|moe_loss_weight|"
    r"_in_fp32|fp32_combine|slow_but_exact|num_logits_to_keep|num_nextn_predict|use_mamba_kernels|use_mambapy|use_associative_scan|"
    r"rescale_prenorm_residual|mrope_section"
)
"""Fields that change no forward pass in evaluation mode, or that other parts of a proof hold: dropout, jitter and
initialisation, caches and outputs, precision, which code computes a scan, special tokens, names, tensors of a
checkpoint that transformers leaves out, ties (the export), the router's losses. A token of text has the same position
on each axis, so that sections of rotary embeddings have no effect either."""

_IMPOSSIBLE = (
    *(ArithmeticError, AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError),
)
"""What configs and models raise for a value that they cannot have."""


@dataclass(frozen=True)
class Flip:
    """What a changed config field did to stock transformers."""

    field: str
    value: Any
    moved: float
    """The largest change of a log-prob; infinite where each model that moves has other shapes, or cannot be built."""

    def is_number_above(self, enough: float) -> bool:
        """Return whether it moved a log-prob further than `enough`, by a model that could run with these weights."""
        return enough < self.moved < float("inf")


@dataclass(frozen=True)
class MergedOps(LocalOps):
    """Operations to which the first two sequences are one: those of a kind alone, "conv", "delta", "rows", or
    ("attention", window, chunk)."""

    kind: Any = "conv"

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: PackedContext, activation: Activation
    ) -> Tensor:
        """Return the convolution."""
        return super().causal_conv1d(x, weight, bias, self._context(context, "conv"), activation)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackedContext
    ) -> Tensor:
        """Return the recurrence."""
        return super().gated_delta_rule(q, k, v, g, beta, self._context(context, "delta"))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: PackedContext, scale: float, window: int | None, **options: Any
    ) -> Tensor:
        """Return attention."""
        kind = ("attention", window, options.get("chunk"))
        return super().attention(q, k, v, self._context(context, kind), scale, window, **options)

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor, context: PackedContext) -> Tensor:
        """Return what a stock layer makes of rows."""
        return super().by_rows(function, x, self._context(context, "rows"))

    def _context(self, context: PackedContext, kind: Any) -> PackedContext:
        if kind != self.kind:
            return context
        edges = torch.cat([context.cu_seqlens[:1], context.cu_seqlens[2:]])
        longest = int((edges[1:] - edges[:-1]).max())
        return PackedContext(edges, longest, LocalOps(self.backend))


@dataclass(frozen=True)
class SeenOps(LocalOps):
    """Operations that note which kinds a model asks for."""

    seen: dict[Any, None] = None  # type: ignore[assignment]

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: PackedContext, activation: Activation
    ) -> Tensor:
        """Return the convolution."""
        self.seen["conv"] = None
        return super().causal_conv1d(x, weight, bias, context, activation)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackedContext
    ) -> Tensor:
        """Return the recurrence."""
        self.seen["delta"] = None
        return super().gated_delta_rule(q, k, v, g, beta, context)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: PackedContext, scale: float, window: int | None, **options: Any
    ) -> Tensor:
        """Return attention."""
        self.seen["attention", window, options.get("chunk")] = None
        return super().attention(q, k, v, context, scale, window, **options)

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor, context: PackedContext) -> Tensor:
        """Return what a stock layer makes of rows."""
        self.seen["rows"] = None
        return super().by_rows(function, x, context)


def flips(
    config: Any, model: Any, rows: Sequence[Tensor], want: Result, enough: float = float("inf")
) -> Iterator[Flip]:
    """Yield what each field of a config that modelling code names does to the stock model with the same weights: the
    largest change of a log-prob, or one above `enough`.

    A size that changes the shape of no weight, and no number, belongs to no layer of the model: it is left out.
    """
    source, make = modeling_code(model, want.gradients), _maker(config, model, rows, want)
    for path, value in _fields(config.get_text_config().to_dict()):
        if path in SIZES or not _named(config, path, source) or _copied(config, path, source):
            continue  # of no interest: spare the passes
        if any(IGNORED.search(name) for name in other_names(config, path)):
            continue
        flip = None
        for other in _others(path, value):
            for changed in _changed_configs(config, path, other):
                if flip is None or not flip.is_number_above(enough):
                    one = Flip(path, other, _moved(changed, make, model, rows, want, enough))
                    flip = one if flip is None or one.is_number_above(enough) or one.moved > flip.moved else flip
        if flip is not None:
            yield flip


def of_absent_layers(config: Any, path: str) -> bool:
    """Return whether a field is of windows that no layer has, or of rotary embeddings of layers of another kind."""
    text = config.get_text_config()
    kinds, rope = {*(getattr(text, "layer_types", None) or ())}, getattr(text, "rope_parameters", None) or {}
    outer, _, name = path.rpartition(".")
    of_kinds = outer.startswith("rope_parameters.") and not kinds.isdisjoint(rope)
    windows = "sliding_window" in name and not any("sliding" in kind for kind in kinds)
    return bool(kinds) and (windows or (of_kinds and outer.split(".")[1] not in kinds))


def _changed_configs(config: Any, path: str, other: Any) -> Iterator[Any]:
    """Yield configs with another value of a field: set, and made anew, where the class derives layer types from it."""
    yield _with(config, path, other)
    text = config.get_text_config()
    if "." in path or not getattr(text, "layer_types", None):
        return
    kept = {name: one for name, one in text.to_dict().items() if name not in ("layer_types", "model_type")}
    try:
        if type(text)(**kept).layer_types == text.layer_types:
            yield _put(config, text, _experts_of(type(text)(**{**kept, path: other}), text))
    except (*_IMPOSSIBLE, StrictDataclassError):
        return


def _named(config: Any, path: str, source: str) -> bool:
    """Return whether source code names a field, and the part of the config that holds it, by any of their names."""
    outer, _, name = path.rpartition(".")
    asked = (name, outer.partition(".")[0] or name)
    names = ["|".join((one, *other_names(config, one))) for one in asked]
    read = r"""((?<!\bself)\.|["'])({0})\b(?!\()|\b({0})="""  # of a config: no variable, no method, no part of a module
    return all(re.search(read.format(one), source) for one in names)


def _copied(config: Any, path: str, source: str) -> bool:
    """Return whether a field is an older spelling of one of `rope_parameters`, which alone modelling code reads."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    return any(path in part for part in parts) and not re.search(rf"""config(\.|, ["']){path}\b""", source)


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if IGNORED.search(name) or value is None:
            continue
        if isinstance(value, dict):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _others(path: str, value: Any) -> Iterator[Any]:
    """Yield other values of a field, the likeliest to be possible first."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, max(1, value // 2), value * 2)  # near: a threshold that nothing crosses moves nothing
    elif isinstance(value, float):
        tiny = 0 < abs(value) < 1e-3  # what keeps a division from zero: as large as what is divided
        near = (100 * value, 1e4 * value, 1.0) if tiny else (value * 1.5 + (not value) / 10, value * 5)
        yield from (*near, value / 10, value * 100)
    elif isinstance(value, list) and value and isinstance(value[0], int | float) and not isinstance(value[0], bool):
        yield [1 - value[0] if {*value} <= {0, 1} else value[-1] + 1, *value[1:]]
        yield [value[-1] * 5, *value[1:]]
    elif isinstance(value, str) and re.search(r"act", path):
        yield "relu" if value != "relu" else "gelu"


def _with(config: Any, path: str, other: Any) -> Any:
    """Return the config with another value of a field; None where it does not take that."""
    changed = copy.deepcopy(config)
    target: Any = changed.get_text_config()
    *parents, name = path.split(".")
    try:
        for parent in parents:
            target = target[parent] if isinstance(target, dict) else getattr(target, parent)
        if isinstance(target, dict):
            target[name] = other
        else:
            setattr(target, name, other)
    except (*_IMPOSSIBLE, StrictDataclassError):
        return None
    return changed


def _put(config: Any, text: Any, other: Any) -> Any:
    """Return the config with another text config."""
    if text is config:
        return other
    whole = copy.deepcopy(config)
    for name in whole.sub_configs:
        if getattr(config, name, None) is text:
            setattr(whole, name, other)
    return whole


def _experts_of(config: Any, other: Any) -> Any:
    """Return the config with the implementation of experts of another."""
    if name := experts_of(other):
        set_experts(config, name)
    return config


def _maker(config: Any, model: Any, rows: Sequence[Tensor], want: Result) -> Callable[[Any], Any]:
    """Return what builds the stock models of changed configs: without values of weights, which others replace, where
    the model of the config itself computes the same so; else as transformers does."""
    return _without_weights if _moved(config, _without_weights, model, rows, want) == 0.0 else _with_weights


def _without_weights(config: Any) -> Any:
    return empty_model(config, torch.float32, is_inside(config))


def _with_weights(config: Any) -> Any:
    return model_of(config, is_inside(config))


def _moved(
    changed: Any,
    make: Callable[[Any], Any],
    model: Any,
    rows: Sequence[Tensor],
    want: Result,
    enough: float = float("inf"),
) -> float:
    """Return how far the stock model of a config (None: there is none) moves a log-prob, with the same weights."""
    if changed is None:
        return float("inf")
    try:
        flipped, state = make(changed), model.state_dict()
        if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in flipped.state_dict().items()}:
            return float("inf")
        flipped.load_state_dict(state, assign=True)
        flipped.to(next(model.parameters()).dtype).eval()
        return largest_move(flipped, rows, want, enough)
    except _IMPOSSIBLE:
        return float("inf")  # the field matters so much that the model cannot be built or run


def largest_move(model: Any, rows: Sequence[Tensor], want: Result, enough: float) -> float:
    """Return how far a stock model's log-probs are from others: of the longest sequence, and of shorter ones until one
    is further than `enough`."""
    before, moved = want.log_probs.split([len(ids) - 1 for ids in rows]), 0.0
    for ids, own in sorted(zip(rows, before, strict=True), key=lambda pair: -len(pair[0])):
        if not (moved := max(moved, largest(stock(model, [ids], gradients=False).log_probs - own))) <= enough:
            break
    return moved
