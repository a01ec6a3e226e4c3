"""Memory beside a step's: weights in a weight sync or a save, and what host memory keeps. From sizes alone.

Each figure is of the code that it names, in bytes of tensors: nothing is fitted, and a test counts what is allocated.
"""

from dataclasses import dataclass

from engines import EngineConfig
from engines.weights.sizes import PIECE_BYTES
from runplan.estimates.states import States
from runplan.model.model_shape import ModelShape, count_parameters, tower_parameters

DISK = 2
"""Bytes of a number in a checkpoint's files and for vLLM: bfloat16."""
WIDE = 4
"""Bytes of a float32."""
FILE_BYTES = 4 * 2**30
"""Bytes of a file of `save_hf` (`engines.weights.saving`)."""


@dataclass(frozen=True)
class Buffer:
    """Bytes on a device and in host memory of one rank; `always`, or only while its use lasts. `note`: what else is
    to be said of it."""

    name: str
    device: float = 0.0
    host: float = 0.0
    always: bool = False
    note: str = ""


def largest_tensor(shape: ModelShape) -> int:
    """Count the elements of a checkpoint's largest tensor in the module: an embedding, or a layer's experts."""
    queries = shape.heads * shape.head_dim * (2 if shape.gated_attention else 1)
    rows = (shape.vocab, 2 * shape.experts * shape.expert_intermediate, shape.intermediate, queries)
    return max(rows) * shape.hidden


def total_parameters(shape: ModelShape) -> int:
    """Count the parameters of decoder and tower, as a checkpoint has them."""
    return count_parameters(shape).total + tower_parameters(shape)


def export_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    """Return the bytes of `export_weights`: a tensor whole on every rank, the one before it, and a copy for the disk.

    Megatron puts tensors together in float32, FSDP2 in the masters' dtype. Two buckets come on top.
    """
    width = WIDE if engine.backend == "megatron" or engine.master_dtype == "float32" else 2
    return largest_tensor(shape) * (2 * width + DISK) + 2 * PIECE_BYTES


def train_buffers(
    shape: ModelShape, engine: EngineConfig, states: States, layers: int, width: int, samples: bool
) -> list[Buffer]:
    """Return what is there for a moment in a training rank with these states, whose stage has `layers` layers.

    `samples`: whether a sampler gets copies of the weights.
    """
    buffers = []
    if states.host and engine.backend == "megatron":
        buffers.append(Buffer("gradients on their way to the optimizer", host=states.optimizer / 3))
    if engine.activation_offload:
        rows = (1 + (engine.router_forwards_ahead or 0)) * engine.max_tokens_per_rank * shape.hidden * layers
        buffers.append(Buffer("recomputed layers' inputs", host=width * rows))
    whole = export_bytes(shape, engine)
    if samples:
        buffers.append(Buffer("export of weights", whole, whole if engine.device == "cpu" else PIECE_BYTES))
    buffers.append(Buffer("model directory", whole, min(FILE_BYTES, DISK * total_parameters(shape))))
    return buffers


def cache_bytes(shape: ModelShape, tp: int) -> int:
    """Return the bytes of a token on a worker in layers of full attention: keys and values of at least one head."""
    return 2 * DISK * shape.full_attention_layers * max(1, shape.kv_heads // tp) * shape.head_dim


def state_bytes(shape: ModelShape, tp: int) -> float:
    """Return the bytes of a request on a worker in gated delta nets.

    A float32 matrix a value head, and the convolution's inputs.
    """
    heads, dim = shape.linear_value_heads, shape.linear_head_dim
    mixed = (2 * shape.linear_key_heads + heads) * dim
    return shape.linear_layers * (WIDE * heads * dim * dim + DISK * mixed * (shape.linear_conv_width - 1)) / tp
