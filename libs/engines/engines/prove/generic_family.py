"""The family of a model type that none of `engines.families` describes: found by its structure, admitted by a proof.

Nothing of its config is checked here. `engines.prove.proof` holds a small model of the config to stock transformers
instead, and `engines.families.registry` hands this family out where a certificate says that it was equal.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import transformers
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engines.families.family import Family
from engines.families.own_family import own_family
from engines.families.router import RouterLoss
from engines.families.stock_router import stock_router_loss
from seqpack.adapters.delta_net import PackedForward
from seqpack.adapters.stock_rows import bloom_attention, mpt_attention, own_attention, own_rows, stock_rows
from seqpack.adapters.subclasses import stock_class

_TABLE = "ALL_ATTENTION_FUNCTIONS"
_CACHES = frozenset(["cache_params", "past_key_values", "past_key_value", "layer_past", "cache", "use_cache"])
"""Names of a cache, or of the wish for one, among a layer's arguments."""
_TEXT_MODELS = ("language_model", "text_model")
"""Names of the text model in a multi-modal one."""
OTHER_TOKENS = re.compile(r"(^|\.)(encoder_attn|crossattention|cross_attn|cross_attention)(_layer_norm)?(\.|$)")
"""Modules that attend to an encoder's output or to images: on text alone no layer calls them."""
_OWN_FORMS = {"BloomAttention": bloom_attention, "MptAttention": mpt_attention}
"""Packed forms of attention that does not ask the table, and computes what others do not (ALiBi)."""
_SCALE_BEFORE_CAP = "output_multiplier"
_SCALES = {"logits_scaling": True, "logit_scale": False, "lm_head_multiplier": False, _SCALE_BEFORE_CAP: False}
"""Config fields with a factor of the logits, and whether it divides them."""
_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Config fields with a bound of the logits."""


@dataclass(frozen=True)
class GenericFamily(Family):
    """A family whose layers are found in the model: what chooses its attention through transformers' table runs packed
    attention, and what takes a cache without that runs as stock code, each sequence in a row of its own."""

    def check_config(self, config: Any) -> None:
        """Check nothing: a proof has."""

    def check_module(self, model: Any) -> None:
        """Refuse (ValueError) a module whose head or layers this engine cannot take apart."""
        head = self.head(model)
        if not isinstance(head, nn.Linear):
            raise ValueError(f"{self.name}: the output layer must be a Linear, got {head}")
        layers = self.layers(model)
        if self.packs and not any(True for layer in layers for _ in self.mixers(layer)):
            raise ValueError(f"{self.name}: no layer of {type(model).__name__} is known to mix tokens")

    def decoder(self, model: Any) -> Any:
        """Return the text model under the head."""
        base = model.base_model
        base = model.model if base is model and hasattr(model, "model") else base
        for name in _TEXT_MODELS:
            if isinstance(part := getattr(base, name, None), nn.Module):
                headed = getattr(part, "get_output_embeddings", lambda: None)() is not None
                inner = part.base_model if headed else part
                return part.model if headed and inner is part and hasattr(part, "model") else inner
        return base

    def head_scale(self, config: Any) -> float:
        """Return the factor of the logits by the fields that are known to hold one."""
        text = config.get_text_config()
        scale = 1.0
        for name, inverse in _SCALES.items():
            value = getattr(text, name, None)
            if isinstance(value, int | float) and value:
                scale *= 1 / value if inverse else value
        return scale

    def soft_cap(self, config: Any) -> float | None:
        """Return the bound of the logits; None where they have none."""
        text = config.get_text_config()
        cap = next((cap for name in _CAPS if (cap := getattr(text, name, None))), None)
        return cap and cap / (getattr(text, _SCALE_BEFORE_CAP, None) or 1.0)

    def auxiliary_loss(
        self, config: Any, coefficient: float | None = None, z_coefficient: float = 0.0
    ) -> RouterLoss | None:
        """Return the router's loss where it is asked for; ValueError where stock code has none, or another."""
        return stock_router_loss(config.get_text_config(), coefficient, z_coefficient)

    def trained(self, model: Any) -> frozenset[str]:
        """Return the names of the parameters that are trained: all."""
        return frozenset(name for name, _ in model.named_parameters(remove_duplicate=False))

    def layers(self, model: Any) -> list[nn.Module]:
        """Return the decoder layers: the first list of modules in the decoder, with mixers where these are known."""
        lists = [module for module in self.decoder(model).modules() if isinstance(module, nn.ModuleList)]
        known = [one for one in lists if any(True for part in one for _ in self.mixers(part))]
        lists = known if known or self.packs else lists
        if not lists:
            raise ValueError(
                f"{self.name}: the decoder of {type(model).__name__} has no layers that are known to mix tokens"
            )
        return list(lists[0])

    def mixers(self, layer: nn.Module) -> Iterator[tuple[nn.Module, PackedForward | None]]:
        """Yield the attention modules of a layer, and those that keep a state between tokens by code of their own."""
        for name, module in layer.named_modules():
            if OTHER_TOKENS.search(name):
                continue
            if chooses_attention(module):
                yield module, own_attention if chooses_keys(module) or masks_itself(module) else None
            elif re.search(r"\.(indexer|compressor)(\.|$)", name):  # inside of attention, which runs it
                continue
            elif module is not layer and keeps_state(module) and not any(_mixes(part) for part in module.children()):
                kind: Any = stock_class(module)
                yield module, _packed_form(kind)


def chooses_attention(module: nn.Module) -> bool:
    """Return whether the stock code of a module looks its attention function up in transformers' table."""
    stock = inspect.unwrap(stock_class(module).forward)
    return isinstance(stock, FunctionType) and _TABLE in stock.__code__.co_names


def masks_itself(module: nn.Module) -> bool:
    """Return whether an attention module has a table of its own (Doge), whose functions take a mask for each head."""
    names = inspect.unwrap(stock_class(module).forward).__globals__
    return names.get(_TABLE) is not ALL_ATTENTION_FUNCTIONS


def chooses_keys(module: nn.Module) -> bool:
    """Return whether an attention module attends to chosen keys (`index_topk`): it chose them, or another layer; or to
    keys that stand for several tokens (DeepSeek-V4)."""
    own = any(getattr(module, name, None) is not None for name in ("indexer", "compressor"))
    return own or bool(getattr(module, "skip_topk", False))


def keeps_state(module: nn.Module) -> bool:
    """Return whether the stock code of a module takes a cache: it then mixes tokens."""
    stock = inspect.unwrap(stock_class(module).forward)
    return isinstance(stock, FunctionType) and not _CACHES.isdisjoint(inspect.signature(stock).parameters)


@cache
def _packed_form(kind: Any) -> PackedForward:
    """Return the packed form of a class of modules that mix tokens by code of their own."""
    if (own := _OWN_FORMS.get(kind.__name__)) is not None:
        return own
    parameters = inspect.signature(kind.forward).parameters
    if "attention_mask" in parameters and "softmax" in inspect.getsource(kind).lower():
        return own_attention
    needed = [one for one in parameters.values() if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    return own_rows if len(needed) > 2 else stock_rows  # more than itself and hidden states


def _mixes(module: nn.Module) -> bool:
    return any(chooses_attention(part) or keeps_state(part) for part in module.modules())


@dataclass(frozen=True)
class TextPartFamily(GenericFamily):
    """A family that is the text part of a multi-modal type: it is trained, and all else goes into exports as it is."""

    inside: bool = True

    def head_scale(self, config: Any) -> float:
        """Return the factor of the logits; 1 where the whole does not scale those of its text model."""
        return super().head_scale(config) if self._names(*_SCALES) else 1.0

    def soft_cap(self, config: Any) -> float | None:
        """Return the bound of the logits; None where the whole does not cap those of its text model."""
        return super().soft_cap(config) if self._names(*_CAPS) else None

    def _names(self, *fields: str) -> bool:
        source = inspect.getsource(getattr(transformers, self.architecture))
        return any(name in source for name in fields)

    def auxiliary_loss(
        self, config: Any, coefficient: float | None = None, z_coefficient: float = 0.0
    ) -> RouterLoss | None:
        """Return the router's loss as the whole computes it; see `GenericFamily`."""
        whole = getattr(transformers, self.architecture)
        return stock_router_loss(config.get_text_config(), coefficient, z_coefficient, whole)

    def head(self, model: Any) -> Any:
        """Return the output layer, of the text model where the whole names none."""
        base = model.base_model
        texts = (getattr(base, name, None) for name in _TEXT_MODELS)
        parts = (model, *(part for part in texts if isinstance(part, nn.Module)))
        return next((head for part in parts if (head := part.get_output_embeddings()) is not None), None)

    def trained(self, model: Any) -> frozenset[str]:
        """Return the names of the parameters that belong to the text part."""
        inside = {parameter for part in self._parts(model) for parameter in part.parameters()}
        return frozenset(name for name, one in model.named_parameters(remove_duplicate=False) if one in inside)

    def check_module(self, model: Any) -> None:
        """Refuse (ValueError) also a module whose other parts would be lost: they come from its directory."""
        super().check_module(model)
        left = {name for name, one in model.named_parameters() if one.requires_grad} - self.trained(model)
        if left:
            raise ValueError(
                f"{self.name}: the text part of this type is trained, and {sorted(left)[0]} is none of it: give the "
                "model's directory, whose other tensors go into every export"
            )

    def reduce(self, model: Any) -> None:
        """Take out what is neither the text model nor the output layer."""
        _keep(model, self._parts(model))

    def _parts(self, model: Any) -> frozenset[nn.Module]:
        return frozenset(part for part in (self.decoder(model), self.head(model)) if part is not None)


def _keep(module: nn.Module, parts: frozenset[nn.Module]) -> None:
    """Take out of a module what belongs to none of these parts of it."""
    for name in (*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))):
        setattr(module, name, None)
    for name, child in list(module.named_children()):
        if child in parts:
            continue
        if parts.isdisjoint(child.modules()):
            setattr(module, name, None)
        else:
            _keep(child, parts)


def is_inside(config: Any) -> bool:
    """Return whether the text part of a config that has no family is trained inside of a multi-modal model."""
    kind = type(config)
    alone = config.get_text_config() is config and kind in MODEL_FOR_CAUSAL_LM_MAPPING
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not alone


def generic_family(config: Any) -> Family:
    """Return the family of a transformers config of any causal language model, or of any multi-modal one that writes
    text: the user's, where there is one. ValueError where it is neither."""
    if (own := own_family(config)) is not None:
        return own
    kind, name = type(config), config.model_type
    if is_inside(config):
        if config.is_encoder_decoder:
            raise ValueError(f"{name} is an encoder-decoder: it has no text part that can be trained alone")
        architecture = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[kind].__name__
        return TextPartFamily(
            name=name, model_types=(name,), architecture=architecture, attention="", fields={}, registered=False
        )
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{name} is no causal language model of this transformers")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__
    return GenericFamily(
        name=name, model_types=(name,), architecture=architecture, attention="", fields={}, registered=False
    )
