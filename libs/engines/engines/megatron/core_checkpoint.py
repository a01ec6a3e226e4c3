"""Weights in megatron-core's own distributed format (`megatron.core.dist_checkpointing`), for who trains with it alone.

An engine's own checkpoints (`save`, `load`) hold the optimizer too, and FSDP2 reads them. What is written here is what
`GPTModel.sharded_state_dict` says of our stages: megatron-core's names and shards, with layers numbered through the
model (`non_homogeneous_layers`) and a layer's norm under the linear after it, where Transformer Engine's specification
has it. Any layout reads what any other wrote. The delta net's norm is kept as its distance from one, as megatron-core
has it, in float64, so that no bit is lost.
"""

import inspect
import queue
from multiprocessing import dummy as threads
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies import filesystem_async

from engines.devices.adaptations import Adaptation, Patch, applied
from engines.extras import missing_extra_message
from engines.megatron.megatron_executor import MegatronExecutor
from engines.megatron.runtime.cuda_calls import VERSIONS, adapted
from engines.megatron.weights.parameters import zero_padding
from engines.mtp.head import is_of_head
from engines.protocol import TrainEngine
from engines.step import Engine


class _Threads(ModuleType):
    """multiprocessing for megatron-core's writer, whose processes are threads."""

    get_context = staticmethod(lambda *_: threads)


def _patches() -> list[Patch]:
    return [
        Patch(filesystem_async, "mp", _Threads("multiprocessing")),
        Patch(filesystem_async, "_results_queue", queue.Queue()),
    ]


BY_THREADS = Adaptation("megatron-core's checkpoints by threads", "megatron-core", VERSIONS, _patches)
"""Writing by threads: megatron-core forks processes, which a process of `engines.launch` may not (`daemonic processes
are not allowed to have children`), and one that uses a GPU should not."""


def save_core_checkpoint(engine: TrainEngine, directory: str | Path) -> None:
    """Write the weights that layers compute with into `directory`, which must be new or empty. Collective.

    In bfloat16 these are the rounded copies of the masters. ValueError for an engine of another backend, one that is
    offloaded, for adapters and image towers, which megatron-core's model has no names for, and without psutil.
    """
    executor = _executor(engine)
    if not getattr(filesystem_async, "HAVE_PSUTIL", True):  # its writer would end without a word, and be waited for
        raise ValueError(
            missing_extra_message("megatron-core writes checkpoints with psutil, which is not installed", "megatron")
        )
    if dist.get_rank() == 0:
        Path(directory).mkdir(parents=True, exist_ok=True)
    dist.barrier(executor.groups.world)
    options = {"async_strategy": "mcore"}  # 0.19 would take another package's writer; 0.16 has this one alone
    known = inspect.signature(dist_checkpointing.save).parameters
    with adapted(executor.device), applied(BY_THREADS):
        dist_checkpointing.save(
            _sharded(executor), str(directory), **{name: x for name, x in options.items() if name in known}
        )


@torch.no_grad()
def load_core_checkpoint(engine: TrainEngine, directory: str | Path) -> None:
    """Read weights that `save_core_checkpoint`, or megatron-core with those names, wrote on any layout. Collective.

    Moments of the optimizer stay as they are. ValueError as in `save_core_checkpoint`; megatron-core's
    CheckpointingException where a tensor is not there or has another shape.
    """
    executor = _executor(engine)
    own = {name: part for name, part in _sharded(executor).items() if not name.endswith("_extra_state")}
    # What is read into is apart from the parameters: those of a factory are put together first.
    targets = {name: part.data for name, part in own.items()}
    with adapted(executor.device):
        loaded = dist_checkpointing.load(own, str(directory))
    for name, target in targets.items():
        target.copy_(loaded[name])
    zero_padding(executor.parameters)
    if executor.updates is not None:
        for part, master in executor.updates.updated():
            if master.data_ptr() != part.values.data_ptr():
                master.copy_(part.values)
        with adapted(executor.device):
            executor.updates.publish()


def _executor(engine: TrainEngine) -> MegatronExecutor:
    executor = engine.executor if isinstance(engine, Engine) else None
    if not isinstance(engine, Engine) or not isinstance(executor, MegatronExecutor):
        raise ValueError("megatron-core's checkpoints are for backend='megatron': use engine.save, or save_hf")
    if executor.adapters is not None or executor.tower is not None:
        raise ValueError("megatron-core's model has no names for adapters and image towers: use engine.save")
    if is_of_head(executor.model, "mtp.fc.weight"):
        raise ValueError("a head for multi-token prediction has other names in megatron-core: use engine.save")
    engine._check_onloaded()
    return executor


def _sharded(executor: MegatronExecutor) -> dict[str, Any]:
    """Return all of this rank's stages, under names that are unique among them."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "non_homogeneous_layers": True,
    }
    out: dict[str, Any] = {}
    for chunk, stage in enumerate(executor.stages):
        for name, part in stage.sharded_state_dict(metadata=dict(metadata)).items():
            if isinstance(part, (ShardedTensor, ShardedTensorFactory)) or name.endswith("_extra_state"):
                out[f"{chunk}.{name}"] = part
    return out
