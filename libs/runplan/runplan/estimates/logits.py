"""Memory of a model's head in its backward pass, from sizes alone: logits of a chunk of tokens, and gradients.

Plain heads take a chunk of tokens at a time (`--trainer.logit-chunk`) and make four float32 matrices of its logits.
Where layers and head are compiled (`engines.fast`), logits stay in the compute dtype and their gradient overwrites
them.
"""

from dataclasses import dataclass

from engines import EngineConfig
from engines.fast.settings import KEPT_BYTES, settings_refusal
from runplan.model.model_shape import ModelShape

WIDE = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class Head:
    """Bytes on a rank that has the head: `logits` of `rows` tokens at a time and what is made of them, `gradients` of
    the head's weights."""

    rows: int
    logits: float
    gradients: float

    @property
    def bytes(self) -> float:
        """Bytes of all of it."""
        return self.logits + self.gradients


def plain_head(shape: ModelShape, rows: int, width: int, tp: int = 1) -> Head:
    """Return the head with the logits of a chunk, and four float32 matrices made of them."""
    vocabulary = shape.vocab / tp
    return Head(rows, rows * vocabulary * (width + 4 * WIDE), vocabulary * shape.hidden * (WIDE + width))


def compiled_head(shape: ModelShape, trained: int, chunk: int, width: int) -> Head:
    """Return the head with all logits where they are few enough to be kept, else those of a chunk."""
    head = shape.vocab * shape.hidden
    every = trained * shape.vocab * width
    if every <= KEPT_BYTES:
        return Head(trained, every, head * width)
    rows = min(trained, chunk)
    return Head(rows, rows * shape.vocab * width, head * (WIDE + width))


def is_compiled(shape: ModelShape, engine: EngineConfig, width: int) -> bool:
    """Return whether FSDP2's layers and head run compiled: those of dense Qwen3.5 and Qwen3 in bfloat16 on CUDA (taken
    to be a Hopper). Layers with experts, which compile="on" compiles too, are counted as plain ones, that keep more."""
    hybrid = shape.linear_layers > 0 and shape.linear_head_dim == 128
    dense = not shape.experts and (hybrid or shape.model_type == "qwen3")
    fits = engine.device == "cuda" and width < WIDE and settings_refusal(engine) is None
    return dense and fits and engine.compile != "off"


def has_fused_pieces(shape: ModelShape, engine: EngineConfig, width: int) -> bool:
    """Return whether a Megatron stage uses fused operators: see `engines.megatron.gpu.fused_layers`."""
    dense = shape.linear_layers > 0 and not shape.experts
    plain = engine.vision == "off" and not engine.lora.rank and engine.compile != "off"
    return dense and plain and engine.device == "cuda" and width < WIDE


def has_fused_head(shape: ModelShape, engine: EngineConfig, width: int, tp: int) -> bool:
    """Return whether a Megatron stage takes log-probs by the compiled head too, which tensor-parallel ranks do not."""
    return has_fused_pieces(shape, engine, width) and tp == 1


def fsdp_head(shape: ModelShape, engine: EngineConfig, trained: int, width: int) -> Head:
    """Return the head's memory for a micro-batch in which `trained` tokens train, under FSDP2."""
    if is_compiled(shape, engine, width):
        return compiled_head(shape, trained, engine.logit_chunk, width)
    return plain_head(shape, min(trained, engine.logit_chunk), width)


def megatron_head(shape: ModelShape, engine: EngineConfig, trained: int, width: int, tp: int) -> Head:
    """Return the head's memory on Megatron's last stage, on one of `tp` ranks that share the vocabulary."""
    if has_fused_head(shape, engine, width, tp):
        return compiled_head(shape, trained, engine.logit_chunk, width)
    return plain_head(shape, min(trained, engine.logit_chunk), width, tp)
