"""Megatron's process groups: made once for a layout, and looked up by megatron-core in a place of its own."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from dyncp.comm.process_groups import world_timeout
from engines.parallel.layout import ParallelLayout
from engines.private_api import megatron_groups

_MADE: dict[str, Any] = {}
"""For which layout and default group megatron-core's groups were made: they belong to the process, as its own do."""


def ensure_groups(layout: ParallelLayout, chunks: int = 1) -> None:
    """Make megatron-core's groups for a layout with `chunks` virtual stages a rank, unless they are there. Collective.

    Context parallelism is ours (`engines.parallel`): megatron-core is told of dp * cp data-parallel ranks. ValueError
    where an engine with another layout was built before in this process: megatron-core has one layout a process.
    """
    world = dist.group.WORLD
    if parallel_state.model_parallel_is_initialized():
        if _MADE.get("world") is world and _MADE.get("layout") == (layout, chunks):
            return
        if _MADE.get("world") is world:
            raise ValueError(
                f"this process has Megatron engines of {_MADE['layout'][0]}, and megatron-core one layout a process: "
                f"{layout} needs processes of its own, or engines.megatron.runtime.process_groups.release() when the "
                "others are gone"
            )
        release()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=world_timeout() / timedelta(minutes=1),
    )
    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)  # there is no dropout, so it has nothing to do
    _MADE.update(world=world, layout=(layout, chunks))


def release() -> None:
    """Forget megatron-core's groups, so that the next engine may have another layout; earlier engines become unusable.

    Collective where the groups are those of the default group that is there: they are destroyed, since each holds
    threads and sockets, on CUDA a communicator, and megatron-core only forgets them.
    """
    if _MADE and _MADE["world"] is dist.group.WORLD:
        made = megatron_groups()
        dist.barrier()  # nobody closes a connection that another rank has still to read from
        for group in made:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    _MADE.clear()
