"""What an engine must know of a model family, and the checks that hold a model to it.

The engine bypasses two parts of a stock model: attention and gated delta nets run on packed sequences through
`seqpack.ops`, and the head is computed in chunks. Everything else is the stock code. A family therefore names every
field of its config: a field that is not named and that modelling code reads, or that has a value that no row of
`python -m engines families` has run, is refused, since the stock model may honour it where this engine would not.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from transformers import GenerationConfig

from engines.families.router import RouterLoss
from engines.families.unread_fields import unread_fields
from seqpack.adapters.delta_net import PackedForward

ANY = None
"""In `Family.fields`: every value is handled, by the stock model itself."""

_METADATA = frozenset(
    [
        *("_name_or_path", "architectures", "chunk_size_feed_forward", "dtype", "torch_dtype", "id2label", "label2id"),
        *("is_encoder_decoder", "model_type", "output_attentions", "output_hidden_states", "problem_type"),
        *("return_dict", "transformers_version"),
        *("gradient_checkpointing", "is_decoder", "add_cross_attention", "prefix"),
        *GenerationConfig().to_dict(),
    ]
)
_ROPE_KEYS = frozenset(
    [
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
        *("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale"),
        *("mscale_all_dim", "truncate", "mrope_section", "mrope_interleaved"),
    ]
)


@dataclass(frozen=True)
class VisionForm:
    """The vision-language model of a family: its tower is `base_model.visual`, its decoder `.language_model`."""

    architecture: str
    """The transformers class that is trained where images are to be seen."""
    fields: Mapping[str, tuple[Any, ...] | None]
    """Fields of `vision_config` that are handled: the values allowed, or ANY."""


@dataclass(frozen=True)
class Family:
    """One model family; see `engines.families.registry` for those there are."""

    name: str
    """The name of its file."""
    model_types: tuple[str, ...]
    """`model_type` of its configs."""
    architecture: str
    """The transformers class that is trained."""
    attention: str
    """Class of its attention layers; their arguments of an attention function are checked in each call."""
    fields: Mapping[str, tuple[Any, ...] | None]
    """Config fields that are handled: the values allowed, or ANY."""
    layer_types: tuple[str, ...] = ("full_attention",)
    """Token mixers that a layer may have."""
    rope_types: tuple[str, ...] = ("default",)
    """Rotary embeddings that its cases run; the angles of "dynamic" depend on earlier calls."""
    delta_nets: Mapping[str, PackedForward] = field(default_factory=dict)
    """Packed forward passes of its gated delta net layers, by class."""
    wrappers: tuple[str, ...] = ()
    """`model_type` of vision-language configs whose text part is this family."""
    vision: VisionForm | None = None
    """The model of these configs with its vision tower; None where images are not supported."""
    registered: bool = True
    """Whether its layers are known by name; of others nothing is left out or replaced but their mixers."""
    packs: bool = True
    """Whether its layers take packed rows; others are trained in padded ones."""
    routed: bool = False
    """Whether it has experts: the router's auxiliary loss, and one tensor an expert on disk."""
    router: str = ""
    """Class of its routers. They return (logits [T, E], weights [T, k], experts i64[T, k]) of T tokens: the weights are
    the softmax of the logits in float32 of these experts, divided by their sum unless `norm_topk_prob` is False."""
    experts: str = ""
    """Class of its routed experts, called with (tokens [T, H], experts i64[T, k], weights [T, k]): `gate_up_proj`
    [E, 2 I, H] and `down_proj` [E, H, I]."""
    float32: tuple[str, ...] = ()
    """Patterns (`fnmatch`, live names) of parameters that stay float32 in an export that asks for a smaller dtype."""
    buffers: tuple[str, ...] = ()
    """Patterns of persistent buffers: part of every export."""
    carried: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Patterns (names on disk) of tensors that are not trained and go into every export as they are, each with the
    config fields that describe them: these are left out of an export that has no such tensor."""

    mtp: bool = False
    """Whether its checkpoints' head for multi-token prediction is that of `engines.mtp.head`."""

    inside: bool = False
    """Whether the text part is trained inside of a multi-modal model, whose other parts are taken out: there is no
    model of the text part alone, or its checkpoints have the names of the whole."""

    def check_config(self, config: Any) -> None:
        """Refuse (ValueError) a config with a field or value that no test of this family has run."""
        unread = self.unread(config)
        for name, value in _set_fields(config).items():
            if name in unread:
                continue
            if name not in self.fields:
                raise ValueError(self._refusal(f"config field {name} = {value!r} is not known to this family"))
            allowed = self.fields[name]
            if allowed is not None and value not in allowed:
                wanted = " or ".join(map(repr, allowed)) or "None"
                raise ValueError(self._refusal(f"config field {name} = {value!r} is not handled, only {wanted}"))
        self._check_layers(config.get_text_config())
        self._check_rope(config.get_text_config())

    def unread(self, config: Any) -> tuple[str, ...]:
        """Return fields of a config that are ignored: unknown to this family, and read by no modelling code."""
        return unread_fields(config, [name for name in _set_fields(config) if name not in self.fields])

    def check_vision(self, config: Any) -> VisionForm:
        """Refuse (ValueError) a config without a vision tower, or with one that no test of this family has run."""
        if self.vision is None or config.model_type not in self.wrappers:
            raise ValueError(f"a model of type {config.model_type!r} sees no images here: leave vision at 'off'")
        for name, value in config.vision_config.to_dict().items():
            if name in _METADATA or value is None:
                continue
            allowed = self.vision.fields.get(name, ())
            if allowed is not None and value not in allowed:
                raise ValueError(self._refusal(f"field {name} = {value!r} of vision_config is not handled"))
        return self.vision

    def reduce(self, model: Any) -> None:
        """Take out of a module that was just made what is not trained; nothing where all of it is."""
        del model

    def sees(self, model: Any) -> bool:
        """Return whether a module is the family's vision-language model."""
        return self.vision is not None and type(model).__name__ == self.vision.architecture

    def tower(self, model: Any) -> nn.Module | None:
        """Return the vision tower, with the part that merges patches into tokens; None of a text model."""
        return model.base_model.visual if self.sees(model) else None

    def decoder(self, model: Any) -> Any:
        """Return the text model under the head: embeddings, layers and the last norm."""
        return model.base_model.language_model if self.sees(model) else model.base_model

    def check_module(self, model: Any) -> None:
        """Refuse (ValueError) a module that is not this family's: its class, its head, its buffers, its layers."""
        if type(model).__name__ != self.architecture and not self.sees(model):
            raise ValueError(self._refusal(f"the model is a {type(model).__name__}, not a {self.architecture}"))
        head = self.head(model)
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(self._refusal(f"the output layer must be a Linear without bias, got {head}"))
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        for name in model.state_dict():
            if name not in parameters and not any(fnmatchcase(name, pattern) for pattern in self.buffers):
                raise ValueError(self._refusal(f"buffer {name} is not known to this family"))
        for layer in self.layers(model):
            if len(list(self.mixers(layer))) != 1:
                raise ValueError(self._refusal(f"a {type(layer).__name__} must mix tokens in exactly one known module"))

    def units(self, model: Any) -> list[nn.Module]:
        """Return the modules that are sharded on their own: the decoder layers, and the blocks of a vision tower."""
        tower: Any = self.tower(model)
        return [*self.layers(model), *(() if tower is None else tower.blocks)]

    def layers(self, model: Any) -> list[nn.Module]:
        """Return the decoder layers in order: the units of recomputation."""
        layers = getattr(self.decoder(model), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ValueError(self._refusal(f"the decoder of {type(model).__name__} has no layers"))
        return list(layers)

    def head(self, model: Any) -> Any:
        """Return the output layer: logits = hidden @ weight.T, times `head_scale`, under `soft_cap`."""
        return model.get_output_embeddings()

    def head_scale(self, config: Any) -> float:
        """Return the factor of the logits."""
        del config
        return 1.0

    def soft_cap(self, config: Any) -> float | None:
        """Return the bound c of the logits, c tanh(logits / c); None where they have none."""
        del config
        return None

    def mixers(self, layer: nn.Module) -> Iterator[tuple[nn.Module, PackedForward | None]]:
        """Yield the modules of a layer that mix tokens, each with its packed form (None: attention)."""
        for module in layer.modules():
            kind = type(module).__name__
            if kind == self.attention:
                yield module, None
            elif kind in self.delta_nets:
                yield module, self.delta_nets[kind]

    def auxiliary_loss(
        self, config: Any, coefficient: float | None = None, z_coefficient: float = 0.0
    ) -> RouterLoss | None:
        """Return the router's losses where the config asks for them (`output_router_logits`, as in transformers), else
        None.

        `coefficient` overrides the config's (0: no balancing); `z_coefficient` is that of the z-loss, which configs do
        not have. ValueError for a model without a router.
        """
        text = config.get_text_config()
        if not self.routed:
            if coefficient is not None or z_coefficient:
                name = "router_z_loss_coef" if coefficient is None else "router_aux_loss_coef"
                raise ValueError(f"{name} is for models with experts, {text.model_type} has none")
            return None
        if coefficient is None:
            coefficient = text.router_aux_loss_coef if text.output_router_logits else 0.0
        if not coefficient and not z_coefficient:
            return None
        return RouterLoss(
            float(coefficient), text.num_experts, text.num_experts_per_tok, routed_layers(text), z_coefficient
        )

    def _check_layers(self, text: Any) -> None:
        for kind in dict.fromkeys(getattr(text, "layer_types", None) or ()):
            if kind not in self.layer_types:
                raise ValueError(
                    self._refusal(f"layer type {kind!r} is not handled, only {', '.join(self.layer_types)}")
                )

    def _check_rope(self, text: Any) -> None:
        parameters = text.rope_parameters or {}
        for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
            kind = rope.get("rope_type", "default")
            if kind not in self.rope_types:
                raise ValueError(self._refusal(f"rope type {kind!r} is not handled, only {', '.join(self.rope_types)}"))
            unknown = [key for key, value in rope.items() if key not in _ROPE_KEYS and not isinstance(value, dict)]
            if unknown:
                raise ValueError(self._refusal(f"rope parameter {unknown[0]} is not known"))

    def _refusal(self, what: str) -> str:
        return (
            f"{self.name}: {what}. What no test has run is refused: make it right in "
            f"engines/families/{self.name}.py and add a row that has it to engines/proofs/family_cases.py"
        )


def _set_fields(config: Any) -> dict[str, Any]:
    """Return the fields of the text part that may change its numbers, where they are set."""
    fields = config.get_text_config().to_dict()
    apart = _METADATA | {"layer_types", "rope_parameters"}
    return {name: value for name, value in fields.items() if name not in apart and value is not None}


def routed_layers(text: Any) -> int:
    """Return the number of layers with experts of a text config, as transformers places them."""
    dense = getattr(text, "mlp_only_layers", None) or ()
    every = getattr(text, "decoder_sparse_step", None) or 1
    return sum(layer not in dense and (layer + 1) % every == 0 for layer in range(text.num_hidden_layers))
