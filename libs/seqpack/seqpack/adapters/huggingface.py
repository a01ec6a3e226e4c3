"""Make a Hugging Face causal LM right on packed rows inside somebody else's training loop.

    adapt_for_packing(model)                  # once, before training; `.undo()` on what it returns puts all back
    model(**collator(samples))                # a row of seqpack.adapters.PackedCollator, or of TRL's padding-free one

Strategy
1. The base model gets a subclass of its class (`seqpack.adapters.mixers`): it takes the flash arguments of a call
   (`cu_seq_lens_q`, ...), which say where sequences begin, and hands a `PackedContext` down to the layers in their
   place. Afterwards it checks that every layer that mixes tokens went through the context.
2. Each such layer runs its packed form over that context: attention, the causal convolution and the gated delta rule of
   `seqpack.ops`. All others are token by token and stay the stock code, the head and the loss too.

A call without flash arguments (padded batches, generate) is the stock model's, and one whose position_ids begin again
inside a row is refused: its boundaries were lost. A copy of the model is adapted as well. Which models are taken is a
table here; each has a row in the tests, which hold packed to one by one, logits and gradients.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from seqpack.adapters.arguments import flash_arguments
from seqpack.adapters.delta_net import PackedForward, joint_projections, split_projections
from seqpack.adapters.mixers import Adaptation, adapt_mixers
from seqpack.adapters.rotary import BY_LENGTH
from seqpack.batches.packed import PackedBatch

_ROPE_TYPES = frozenset(["default", "linear", "llama3", "yarn", BY_LENGTH])
"""Types whose angles depend on a token's position, and its sequence's length; "dynamic" depends on earlier calls."""


@dataclass(frozen=True)
class Mixers:
    """The layers of a `model_type` that mix tokens, by class: attention; gated delta nets with their packed form."""

    attention: str
    delta_nets: Mapping[str, PackedForward] = field(default_factory=dict)


MIXERS = {
    "gemma3_text": Mixers("Gemma3Attention"),
    "llama": Mixers("LlamaAttention"),
    "mistral": Mixers("MistralAttention"),
    "qwen2": Mixers("Qwen2Attention"),
    "qwen3": Mixers("Qwen3Attention"),
    "qwen3_moe": Mixers("Qwen3MoeAttention"),
    "qwen3_next": Mixers("Qwen3NextAttention", {"Qwen3NextGatedDeltaNet": joint_projections}),
    "qwen3_5_text": Mixers("Qwen3_5Attention", {"Qwen3_5GatedDeltaNet": split_projections}),
    "qwen3_5_moe_text": Mixers("Qwen3_5MoeAttention", {"Qwen3_5MoeGatedDeltaNet": split_projections}),
}


def adapt_for_packing(model: Any) -> Adaptation:
    """Change this model instance so that it takes packed rows with flash arguments; once adapted, a no-op.

    `model`: a transformers causal LM, before it is wrapped for parallel training. ValueError for a model type that no
    test has run (the table `MIXERS`), for a layer whose mixer is not known, and for angles that depend on earlier calls
    ("dynamic").
    """
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("adapt_for_packing needs a transformers model, this one has no config")
    known = MIXERS.get(config.model_type)
    if known is None:
        raise ValueError(
            f"model type {config.model_type!r} is not known to packing, only {', '.join(sorted(MIXERS))}: add it to "
            "MIXERS in seqpack/adapters/huggingface.py, and a row to its test"
        )
    _check_rope(config)
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise ValueError(f"{type(model).__name__} has no base_model.layers: hand the causal LM itself")
    return adapt_mixers(model, [_mixer(layer, known) for layer in layers])


def packed_forward(model: nn.Module, packed: PackedBatch) -> Tensor:
    """Return logits [T, V] of a row by an adapted model; what `seqpack.testing.assert_packing_isolated` takes."""
    ids, positions = packed.values["input_ids"][None], packed.position_ids.unsqueeze(-2)
    output = model(input_ids=ids, position_ids=positions, use_cache=False, **flash_arguments(packed))
    logits: Tensor = output.logits
    return logits[0]


def _mixer(layer: nn.Module, known: Mixers) -> tuple[nn.Module, PackedForward | None]:
    """Return the one module of a layer that mixes tokens, and its packed forward (None: attention)."""
    mixers: list[tuple[nn.Module, PackedForward | None]] = []
    for module in layer.modules():
        kind = type(module).__name__
        if kind == known.attention:
            mixers.append((module, None))
        elif kind in known.delta_nets:
            mixers.append((module, known.delta_nets[kind]))
    if len(mixers) != 1:
        wanted = " or ".join([known.attention, *known.delta_nets])
        raise ValueError(f"a {type(layer).__name__} must hold exactly one {wanted}, this one holds {len(mixers)}")
    return mixers[0]


def _check_rope(config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in [parameters, *(part for part in parameters.values() if isinstance(part, dict))]:
        kind = rope.get("rope_type", "default")
        if kind not in _ROPE_TYPES:
            raise ValueError(f"rope type {kind!r}: its angles depend on the calls before, not handled")
