"""Bytes of weights, gradients and optimizer states on a rank, by part. Activations and caches come on top."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engines import EngineConfig
from engines.fast.settings import replication_refusal
from runplan.estimates.loading import DISK_BYTES
from runplan.layout.grid import Grid
from runplan.model.adapters import adapter_parameters
from runplan.model.matrices import dense_matrices, matrix_parameters
from runplan.model.model_shape import ModelShape, count_parameters, head_parameters, tower_parameters

GIB = 2**30


@dataclass(frozen=True)
class StageParameters:
    """Parameters that a rank of one pipeline stage holds, by how their optimizer states are sharded."""

    dense: float
    """Parameters sharded over the ranks that share data and context."""
    experts: float
    """Parameters sharded over the ranks that hold the same experts."""
    matrices: float = 0.0
    """Those of `dense` that Muon would update; it updates all experts."""


def parameters_by_stage(
    shape: ModelShape, grid: Grid, layers: Sequence[int], mtp: bool = False
) -> list[StageParameters]:
    """Count the parameters on a rank of each stage.

    The first has the embedding, the last the head (one matrix where tied), and that for multi-token prediction where it
    is trained (`mtp`).
    """
    count = count_parameters(shape)
    matrices = 1 if shape.tied_embeddings else 2
    matrix = count.embeddings / matrices / grid.tp
    stages = []
    for stage, here in enumerate(layers):
        share = here / shape.layers
        ends = (stage == 0) + (stage == len(layers) - 1)
        ends = min(ends, matrices) if len(layers) == 1 else ends
        stages.append(
            StageParameters(
                share * count.dense / grid.tp + ends * matrix,
                share * count.experts / (grid.ep * grid.etp),
                share * dense_matrices(shape) / grid.tp,
            )
        )
    if mtp:
        head, last = head_parameters(shape), stages[-1]
        whole = 2 * shape.hidden**2  # its first matrix is on every tensor-parallel rank
        dense = last.dense + whole + (head.dense - whole) / grid.tp
        stages[-1] = replace(last, dense=dense, experts=last.experts + head.experts / (grid.ep * grid.etp))
    return stages


@dataclass(frozen=True)
class States:
    """Bytes of a rank. `optimizer`: float32 masters, where weights are narrower, and moments, wherever they are: two,
    under Muon one of a matrix."""

    weights: float
    gradients: float
    optimizer: float
    on_host: bool = False
    """Whether the optimizer's states are in host memory."""
    all_on_host: bool = False
    """Whether all states are in host memory (`parameters_on_host`)."""

    @property
    def device(self) -> float:
        """Bytes of them on a device."""
        if self.all_on_host:
            return 0.0
        return self.weights + self.gradients + (0.0 if self.on_host else self.optimizer)

    @property
    def host(self) -> float:
        """Bytes of them in host memory."""
        if self.all_on_host:
            return self.weights + self.gradients + self.optimizer
        return self.optimizer if self.on_host else 0.0


def megatron_states(
    engine: EngineConfig, grid: Grid, parameters: StageParameters, width: int, tower: int = 0
) -> States:
    """Return weights in the compute dtype of `width` bytes, and gradients, masters and two moments in float32.

    The distributed optimizer shares out the last two. `tower`: parameters of a frozen vision tower, whole on each rank
    of the first stage.
    """
    own = 12 if width < 4 or engine.optimizer_on_host else 8
    dense, experts = (grid.dp * grid.cp, grid.edp) if engine.distributed_optimizer else (1, 1)
    every = parameters.dense + parameters.experts
    share = own * (parameters.dense / dense + parameters.experts / experts)
    if engine.optimizer == "muon":
        share -= 4 * (parameters.matrices / dense + parameters.experts / experts)
    return States(width * (every + tower), 4.0 * every, share, engine.optimizer_on_host)


def width_of(engine: EngineConfig) -> int:
    """Return the bytes of a number in the dtype that layers compute in."""
    wide = engine.dtype == "float32" or (engine.dtype == "auto" and engine.device == "cpu")
    return 4 if wide else 2


def lies_replicated(engine: EngineConfig, shards: float) -> bool:
    """Return whether every rank holds FSDP2's weights whole, in the dtype of layers: as asked, or alone on a GPU."""
    alone = engine.weights == "auto" and shards == 1 and engine.device not in ("cpu", "npu")
    return (alone or engine.weights == "replicated") and replication_refusal(engine) is None


def fsdp_states(shape: ModelShape, engine: EngineConfig, shards: float, disk: int = DISK_BYTES) -> States:
    """Return masters, gradients and two moments, shared by `shards` ranks; of a frozen tower masters.

    With adapters they are theirs alone, and the rest is frozen in the checkpoint's dtype, of `disk` bytes. Replicated
    weights are whole on each rank, and what makes them float32 is shared beside the moments.
    """
    master = 4 if engine.master_dtype == "float32" else 2
    moment = 4 if engine.optimizer_on_host else 2 if engine.moments_dtype == "bfloat16" else master
    tower = 0 if engine.vision == "off" else tower_parameters(shape)
    model = count_parameters(shape).total + (head_parameters(shape).total if engine.mtp_loss_scaling_factor else 0)
    trained = model + (tower if engine.vision == "trained" else 0)
    every = model + tower
    if engine.lora.rank:
        adapters = adapter_parameters(shape, engine.lora)
        parts = (disk * every + master * adapters, master * adapters, 2 * moment * adapters)
        weights, gradients, optimizer = (part / shards for part in parts)
        return States(weights, gradients, optimizer, engine.optimizer_on_host, engine.parameters_on_host)
    if lies_replicated(engine, shards):
        width = width_of(engine)
        return States(float(width * every), 4.0 * trained / shards, (2 * moment + 4 - width) * trained / shards)
    moments = 2 * trained - (matrix_parameters(shape) if engine.optimizer == "muon" else 0)
    optimizer = moment * moments / shards
    weights, gradients = master * every / shards, master * trained / shards
    return States(weights, gradients, optimizer, engine.optimizer_on_host, engine.parameters_on_host)
