"""The memory table of a plan: what stays in the memory of the fullest rank, by name.

The names are those under which a run registers what it allocates (`seqpack.memory.ledger`), and a run prints the same
table; a test compares the two (`apps/grpo/tests/memory_table_test.py`).
"""

from collections.abc import Iterable, Iterator

from engines import EngineConfig
from engines.weights.sizes import PIECE_BYTES
from runplan.estimates.buffers import Buffer, total_parameters
from runplan.estimates.loading import DISK_BYTES
from runplan.estimates.states import States, lies_replicated, width_of
from runplan.model.adapters import adapter_parameters, syncs_adapters
from runplan.model.model_shape import ModelShape, count_parameters, tower_parameters
from runplan.run_spec import RunSpec
from runplan.samplers.pool_lines import gib, places
from seqpack.memory import names as ledger

TOKEN_BYTES = 8 + 8 + 1 + 4 + 4 + 4 + 4 + 4
"""Bytes of a token of a batch: id, position, mask, three log-probs, advantage, version."""


def memory_table(spec: RunSpec, shape: ModelShape, states: States, disk: int = DISK_BYTES) -> list[Buffer]:
    """Return the rows of a training rank with these states, and of a native sampler; `disk`: bytes of a number in the
    checkpoint."""
    rows = [*_training(spec, shape, states), *_moving(spec, shape, states, disk)]
    if spec.app == "grpo":
        rows += spec.cluster.sampler.held(spec, shape)
    order = {name: place for place, name in enumerate(ledger.NAMES)}
    return sorted((row for row in rows if row.device + row.host), key=lambda row: order[row.name])


def table_lines(rows: Iterable[Buffer], on_cpu: bool) -> list[str]:
    """Return a line for each row; on a CPU without places, since there is one."""
    return [f"{row.name}: {gib(row.device + row.host) if on_cpu else places(row)}" for row in rows]


def reference_bytes(spec: RunSpec, shape: ModelShape, states: States) -> float:
    """Return the bytes of a rank's part of the frozen reference model; 0 where an adapter's base is it."""
    engine = spec.engine
    if not spec.reference_policy or engine.lora.rank:
        return 0.0
    if engine.backend == "megatron":
        return states.weights
    width = 2 if "bfloat16" in (engine.master_dtype, engine.dtype) else width_of(engine)
    seen = 0 if engine.vision == "off" else tower_parameters(shape)
    return width * (count_parameters(shape).total + seen) / spec.shards


def _training(spec: RunSpec, shape: ModelShape, states: States) -> Iterator[Buffer]:
    for name, size, on_host in (
        (ledger.WEIGHTS, states.weights, states.all_on_host),
        (ledger.GRADIENTS, states.gradients, states.all_on_host),
        (ledger.OPTIMIZER, states.optimizer, states.all_on_host or states.on_host),
    ):
        yield Buffer(name, 0.0 if on_host else size, size if on_host else 0.0, always=True)
    size, cpu = reference_bytes(spec, shape, states), spec.engine.device == "cpu"
    device = 0.0 if spec.engine.parameters_on_host and not cpu else size
    yield Buffer(ledger.REFERENCE, device, 0.0 if cpu else size, always=True, note="on the device while it scores")


def _moving(spec: RunSpec, shape: ModelShape, states: States, disk: int) -> Iterator[Buffer]:
    engine = spec.engine
    if spec.cluster.offload and engine.device != "cpu":
        yield Buffer(ledger.OFFLOAD, host=max(0.0, states.device - states.gradients), always=True)
    yield Buffer(ledger.CHECKPOINT, host=_saved(shape, engine, states, spec.shards), note="while it is written")
    tokens = spec.rows * spec.group * spec.longest
    yield Buffer(ledger.BATCH, host=float(TOKEN_BYTES * tokens), always=True, note="at most")
    if spec.app == "grpo" and not spec.cluster.sampler.shares_weights(spec):
        whole = disk * total_parameters(shape)
        if syncs_adapters(engine.lora):
            whole = 4 * adapter_parameters(shape, engine.lora)
        size = float(min(PIECE_BYTES, whole))
        cpu = engine.device == "cpu"
        yield Buffer(ledger.BUCKETS, 0.0 if cpu else size, size if cpu else 0.0, note="in a weight sync, at most")


def _saved(shape: ModelShape, engine: EngineConfig, states: States, shards: int) -> float:
    """Return the bytes of a rank's part of a checkpoint: weights (float32 masters where there are any) and moments."""
    if engine.lora.rank and engine.backend == "fsdp2":
        width = 4 if engine.master_dtype == "float32" else 2
        return width * adapter_parameters(shape, engine.lora) / shards + states.optimizer
    if engine.backend == "fsdp2" and lies_replicated(engine, shards):
        return states.optimizer * 12 / (12 - width_of(engine))  # float32 rows, joined from two parts
    masters = engine.backend == "megatron" and (width_of(engine) < 4 or engine.optimizer_on_host)
    return (0.0 if masters else states.weights) + states.optimizer
