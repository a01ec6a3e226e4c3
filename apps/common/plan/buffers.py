"""Memory beside a step's: weights on their way to a sampler or a disk, and what host memory keeps. From sizes alone.

Each figure is of the code that it names, in bytes of tensors: nothing is fitted, and a test counts what is allocated.
"""

from dataclasses import dataclass

import torch

from apps.common.cluster import Cluster, RolloutLayout
from apps.common.plan.memory import States
from apps.common.plan.model_shape import ModelShape, count_parameters, tower_parameters
from engines import EngineConfig
from engines.fast.support import replicated_weights
from engines.step import PIECE_BYTES

DISK = 2
"""Bytes of a number in a checkpoint's files and for vLLM: bfloat16."""
WIDE = 4
"""Bytes of a float32."""
FILE_BYTES = 4 * 2**30
"""Of a file of `save_hf` (`engines.weights.saving`)."""


@dataclass(frozen=True)
class Buffer:
    """Bytes on a device and in host memory of one rank; `always`, or only while what it is for goes on."""

    name: str
    device: float = 0.0
    host: float = 0.0
    always: bool = False


def largest_tensor(shape: ModelShape) -> int:
    """Elements of a checkpoint's largest tensor as the module holds it: an embedding, or a layer's experts."""
    queries = shape.heads * shape.head_dim * (2 if shape.gated_attention else 1)
    rows = (shape.vocab, 2 * shape.experts * shape.expert_intermediate, shape.intermediate, queries)
    return max(rows) * shape.hidden


def total_parameters(shape: ModelShape) -> int:
    """Decoder and tower, as a checkpoint holds them."""
    return count_parameters(shape).total + tower_parameters(shape)


def export_bytes(shape: ModelShape, engine: EngineConfig) -> float:
    """Return of `export_weights`: a tensor whole on every rank, the one before it, and its copy in a checkpoint's
    dtype.

    Megatron puts tensors together in float32, FSDP2 in the masters' dtype. Two buckets come on top.
    """
    kept = WIDE if engine.backend == "megatron" or engine.master_dtype == "float32" else 2
    return largest_tensor(shape) * (2 * kept + DISK) + 2 * PIECE_BYTES


def kept_apart(engine: EngineConfig, cluster: Cluster) -> str | None:
    """Return why the native sampler of a training process can't compute with that one's own weights, whatever it trains
    with; None where it may."""
    mode = cluster.schedule.mode
    if cluster.rollout.engine != "native" or cluster.rollout.ray_workers or mode == "fully_async":
        return "it is in a process of its own"
    if mode != "sync":
        return f"{mode} samples by earlier weights while these are trained"
    if cluster.offload:
        return "training's weights are in host memory while answers are sampled"
    if engine.device == "npu":
        return "shared weights have not been run on an NPU"
    return None


def shares_weights(engine: EngineConfig, cluster: Cluster, ranks: int, shards: int) -> bool:
    """Return whether the native sampler computes with the trainer's weights in place; a run asks its engine itself
    (`engines.shared_weights`). `shards`: ranks that share a copy of sharded weights."""
    if kept_apart(engine, cluster) is not None or engine.backend != "fsdp2" or engine.lora.rank:
        return False
    on_cpu = engine.device == "cpu"
    alone = engine.weights == "auto" and ranks == 1 and not on_cpu
    if (alone or engine.weights == "replicated") and replicated_weights(engine, torch.device("cpu")):
        return True
    dtype = ("float32" if on_cpu else "bfloat16") if engine.dtype == "auto" else engine.dtype
    return shards == 1 and dtype == engine.master_dtype and (on_cpu or not engine.parameters_on_host)


def train_buffers(
    shape: ModelShape, engine: EngineConfig, states: States, layers: int, offload: bool, width: int, samples: bool
) -> list[Buffer]:
    """Return of a training rank with these states, of whose stage there are `layers`; `samples`: a sampler is handed
    copies of the weights."""
    found = (
        [Buffer("all states" if states.all_on_host else "optimizer states", host=states.host, always=True)]
        if states.host
        else []
    )
    if states.host and engine.backend == "megatron":
        found.append(Buffer("gradients on their way to the optimizer", host=states.optimizer / 3))
    if engine.activation_offload:
        rows = engine.max_tokens_per_rank * shape.hidden * layers
        found.append(Buffer("recomputed layers' inputs", host=width * rows))
    if offload:
        found.append(Buffer("offload", host=max(0.0, states.device - states.gradients)))
    whole = export_bytes(shape, engine)
    if samples:
        found.append(Buffer("hand-over", whole, whole if engine.device == "cpu" else PIECE_BYTES))
    masters = states.optimizer / 3 if engine.backend == "megatron" and width < WIDE else 0.0
    weights = 0.0 if masters else states.weights
    found.append(Buffer("checkpoint, copied to be written meanwhile", host=weights + states.optimizer))
    found.append(Buffer("model directory", whole, min(FILE_BYTES, DISK * total_parameters(shape))))
    return found


def sampler_buffers(shape: ModelShape, layout: RolloutLayout, width: int) -> list[Buffer]:
    """Return of the process that a sampler belongs to (vLLM: one of tp x dp devices; native: each)."""
    if layout.engine == "vllm":
        # rollout.vllm.weights.shared_weights: the set in use and the one that is staged, where workers read them.
        two = 2.0 * DISK * total_parameters(shape)
        if layout.weights_on_device:
            return [Buffer("two sets of weights", device=two, always=True)]
        return [Buffer("two sets of weights", host=two, always=True)]
    if layout.engine == "native":
        whole = float(width * total_parameters(shape))
        return [
            Buffer("weights", device=whole, always=True),
            Buffer("staged weights", device=whole + width * largest_tensor(shape)),
        ]
    return []


def vllm_weights(shape: ModelShape, layout: RolloutLayout) -> float:
    """Return bytes of a worker: its part of each matrix, and of the experts."""
    count = count_parameters(shape)
    sharers = layout.tp if layout.ep == 1 else max(layout.tp, layout.ep)
    dense = (count.embeddings + count.dense + tower_parameters(shape)) / layout.tp
    return DISK * (dense + count.experts / sharers)


def cache_bytes(shape: ModelShape, tp: int) -> int:
    """Return of a token on a worker, in layers of full attention: keys and values of its heads, one at least."""
    return 2 * DISK * shape.full_attention_layers * max(1, shape.kv_heads // tp) * shape.head_dim


def state_bytes(shape: ModelShape, tp: int) -> float:
    """Return of a request on a worker, in gated delta nets: a float32 matrix a value head, and the convolution's
    inputs."""
    heads, dim = shape.linear_value_heads, shape.linear_head_dim
    mixed = (2 * shape.linear_key_heads + heads) * dim
    return shape.linear_layers * (WIDE * heads * dim * dim + DISK * mixed * (shape.linear_conv_width - 1)) / tp
