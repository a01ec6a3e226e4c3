"""The sizes of a published model, enough to plan with: no weights and no config file are read."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class VisionTower:
    """Sizes of Qwen3.5's vision tower, the defaults those of transformers' Qwen3_5VisionConfig.

    Patches of `patch` x `patch` pixels, `temporal_patch` frames and `channels` colors; `merge` x `merge` of them make a
    token of the decoder's hidden size.
    """

    layers: int = 27
    hidden: int = 1152
    intermediate: int = 4304
    positions: int = 2304
    patch: int = 16
    temporal_patch: int = 2
    channels: int = 3
    merge: int = 2

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) < 1:
                raise ValueError(f"{item.name} of a vision tower must be at least 1, got {getattr(self, item.name)}")


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes. `full_attention_interval` n: every n-th layer attends in full, others are gated delta nets.

    Dense where `experts` is 0. `vision`: the tower beside it, counted by `tower_parameters`.
    """

    name: str
    model_type: str
    """The text config's `model_type` in transformers."""
    source: str
    """Source of the sizes."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    intermediate: int = 0
    """Width of a dense layer's MLP."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_expert_intermediate: int = 0
    gated_attention: bool = False
    """Whether queries have an output gate of their own size."""
    full_attention_interval: int = 1
    attention_layers: int | None = None
    """Number of layers with full attention, where they are not every `full_attention_interval`-th."""
    linear_key_heads: int = 0
    linear_value_heads: int = 0
    linear_head_dim: int = 128
    linear_conv_width: int = 4
    tied_embeddings: bool = False
    vision: VisionTower | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, int) and value < 0:
                raise ValueError(f"{item.name} must not be negative, got {value}")
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.head_dim, self.vocab) < 1:
            raise ValueError("layers, hidden, heads, kv_heads, head_dim and vocab must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if bool(self.experts) != bool(self.expert_intermediate) or self.experts_per_token > self.experts:
            raise ValueError("experts, expert_intermediate and experts_per_token go together, the last at most experts")
        if bool(self.experts) == bool(self.intermediate):
            raise ValueError("a layer has either experts or an intermediate size")
        if (self.linear_layers > 0) != bool(self.linear_key_heads and self.linear_value_heads):
            raise ValueError("linear_key_heads and linear_value_heads go with full_attention_interval above 1")

    @property
    def full_attention_layers(self) -> int:
        """Number of layers with full attention."""
        return self.layers // self.full_attention_interval if self.attention_layers is None else self.attention_layers

    @property
    def linear_layers(self) -> int:
        """Number of gated delta nets."""
        return self.layers - self.full_attention_layers


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters; total = embeddings + dense + experts, and `active` of them touch each token."""

    embeddings: int
    dense: int
    experts: int
    active: int

    @property
    def total(self) -> int:
        """Number of all parameters."""
        return self.embeddings + self.dense + self.experts


def shape_of(config: PretrainedConfig, name: str) -> ModelShape:
    """Return the sizes of a transformers config of one of these families. Raise ValueError where they don't fit."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    hybrid, full = "linear_attention" in kinds, [at for at, kind in enumerate(kinds) if kind == "full_attention"]
    interval = max(2, min(full, default=0) + 1) if hybrid else 1
    regular = full == list(range(interval - 1, len(kinds), interval))

    def size(field: str) -> int:
        return int(getattr(text, field, None) or 0)

    return ModelShape(
        name=name,
        model_type=text.model_type,
        source="a config",
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=size("num_key_value_heads") or text.num_attention_heads,
        head_dim=size("head_dim") or text.hidden_size // text.num_attention_heads,
        vocab=text.vocab_size,
        intermediate=0 if size("num_experts") else text.intermediate_size,
        experts=size("num_experts"),
        experts_per_token=size("num_experts_per_tok"),
        expert_intermediate=size("moe_intermediate_size"),
        shared_expert_intermediate=size("shared_expert_intermediate_size"),
        gated_attention=hybrid,
        full_attention_interval=interval,
        attention_layers=len(full) if hybrid and not regular else None,
        linear_key_heads=size("linear_num_key_heads") if hybrid else 0,
        linear_value_heads=size("linear_num_value_heads") if hybrid else 0,
        linear_head_dim=size("linear_key_head_dim") or 128,
        tied_embeddings=bool(text.tie_word_embeddings),
        vision=_tower_of(getattr(config, "vision_config", None)),
    )


def _tower_of(config: Any) -> VisionTower | None:
    if not hasattr(config, "depth"):  # another tower than Qwen3.5's
        return None
    return VisionTower(
        layers=config.depth,
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        positions=config.num_position_embeddings,
        patch=config.patch_size,
        temporal_patch=config.temporal_patch_size,
        channels=config.in_channels,
        merge=config.spatial_merge_size,
    )


def count_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of Qwen3, Qwen3-MoE, Qwen3.5 and Qwen3.5-MoE text models exactly, as transformers does."""
    mixers = shape.full_attention_layers * _attention(shape) + shape.linear_layers * _delta_net(shape)
    norms = (2 * shape.layers + 1) * shape.hidden
    expert = 3 * shape.hidden * shape.expert_intermediate
    shared = 3 * shape.hidden * shape.shared_expert_intermediate
    gates = shape.hidden * (shape.experts + bool(shape.shared_expert_intermediate))
    mlp = shared + gates if shape.experts else 3 * shape.hidden * shape.intermediate
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)
    dense = mixers + norms + shape.layers * mlp
    return Parameters(
        embeddings=embeddings,
        dense=dense,
        experts=shape.layers * shape.experts * expert,
        active=embeddings + dense + shape.layers * shape.experts_per_token * expert,
    )


def head_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a head for multi-token prediction exactly (`engines.mtp.head`): a layer of full attention
    as the model's, a matrix in front of it, and three norms."""
    layer = count_parameters(
        replace(
            shape, layers=1, full_attention_interval=1, attention_layers=None, linear_key_heads=0, linear_value_heads=0
        )
    )
    dense = layer.dense - shape.hidden + 2 * shape.hidden**2 + 3 * shape.hidden  # the model's last norm is not its own
    active = layer.active - layer.embeddings - layer.dense + dense
    return Parameters(embeddings=0, dense=dense, experts=layer.experts, active=active)


def tower_parameters(shape: ModelShape) -> int:
    """Count the parameters of the vision tower exactly, as transformers does; 0 for a text model."""
    tower = shape.vision
    if tower is None:
        return 0
    wide = tower.hidden
    pixels = tower.channels * tower.temporal_patch * tower.patch**2
    attention = 3 * (wide + 1) * wide + (wide + 1) * wide
    mlp = (wide + 1) * tower.intermediate + (tower.intermediate + 1) * wide
    merged = tower.merge**2 * wide
    merger = 2 * wide + (merged + 1) * merged + (merged + 1) * shape.hidden
    return (pixels + 1) * wide + tower.positions * wide + tower.layers * (attention + mlp + 4 * wide) + merger


def _attention(shape: ModelShape) -> int:
    queries = shape.heads * shape.head_dim
    keys = shape.kv_heads * shape.head_dim
    gated = 2 if shape.gated_attention else 1
    return shape.hidden * (gated * queries + 2 * keys) + queries * shape.hidden + 2 * shape.head_dim


def _delta_net(shape: ModelShape) -> int:
    """Count projections of q, k, v, gate, two scalars a head, the convolution, decay and time step, norm and output."""
    keys = shape.linear_key_heads * shape.linear_head_dim
    values = shape.linear_value_heads * shape.linear_head_dim
    mixed = 2 * keys + values
    inputs = shape.hidden * (mixed + values + 2 * shape.linear_value_heads)
    state = mixed * shape.linear_conv_width + 2 * shape.linear_value_heads + shape.linear_head_dim
    return inputs + state + values * shape.hidden
