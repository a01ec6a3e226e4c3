"""Curves of two steps for the Megatron backend's tests on GPUs, as FSDP2 makes them on one device."""

from typing import Any

import torch.distributed as dist

from engines.build import build_engine
from engines.config import EngineConfig
from engines.megatron.runtime.process_groups import release
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from seqpack.batches.objective import Objective

LENGTHS = [700, 5, 333, 64, 1, 945]
"""Lengths of `engines/cuda_test.py`: kernels are tuned for each shape."""
STEPS = 2
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "moe": ("moe", {**EXPERTS, "shared_expert_intermediate_size": 256, "output_router_logits": True}),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2": ("dense", {"tensor_parallel": 2}),
    "PP2": ("dense", {"pipeline_parallel": 2}),
    "PP2, virtual 2": ("dense", {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "CP2": ("dense", {"context_parallel": "static:2"}),
    "dynamic": ("dense", {"context_parallel": "dynamic"}),
    "DP2": ("dense", {}),
    "DP2, distributed optimizer": ("dense", {"distributed_optimizer": True}),
    "EP2": ("moe", {"expert_parallel": 2}),
    "EP2, distributed optimizer": ("moe", {"expert_parallel": 2, "distributed_optimizer": True}),
    "TP2, experts": ("moe", {"tensor_parallel": 2}),
}
"""Layouts of two devices: model and fields of `EngineConfig`."""
PRODUCTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP2, PP2": ("dense", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "TP2, PP2, virtual 2": ("dense", {"tensor_parallel": 2, "pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "TP2, CP2": ("dense", {"tensor_parallel": 2, "context_parallel": "static:2", "distributed_optimizer": True}),
    "TP2, dynamic": ("dense", {"tensor_parallel": 2, "context_parallel": "dynamic"}),
    "PP2, dynamic": ("dense", {"pipeline_parallel": 2, "context_parallel": "dynamic"}),
    "TP2, EP2, ETP2": ("moe", {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}),
    "TP2, PP2, EP2": ("moe", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
    "PP2, EP2, dynamic": ("moe", {"pipeline_parallel": 2, "expert_parallel": 2, "context_parallel": "dynamic"}),
    "EP4, distributed optimizer": ("moe", {"expert_parallel": 4, "distributed_optimizer": True}),
}
"""Layouts of four devices."""
Curve = list[tuple[float, float, float]]
"""Loss, gradient norm, and whether it was skipped, of each step."""


def curve(device: str, dtype: str, backend: str, model: str, objective: Objective, **sizes: Any) -> Curve:
    """Return the losses and norms of two steps on all ranks of the process group."""
    kind, changes = MODELS[model]
    shared = sizes.get("context_parallel", "off") != "off"
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    config = EngineConfig(
        backend=backend, device=device, dtype=dtype, lr=1e-3, eps=1e-2,  # type: ignore[arg-type]
        max_tokens_per_rank=512 if shared else 1024, **sizes,
    )  # fmt: skip
    engine = build_engine(config, tiny_model(kind, scale=1.0, **{**FUSED_SIZES, **changes}))
    vocab = FUSED_SIZES["vocab_size"]
    steps = [engine.train_batch(tiny_batch(LENGTHS, seed=seed, vocab=vocab), objective) for seed in range(STEPS)]
    return [(step["loss"], step["grad_norm"], step["skipped"]) for step in steps]


def layout_curves(device: str, dtypes: list[str], objective: Objective) -> dict[tuple[str, str], Curve]:
    """Return the curves of every layout that has as many ranks as the process group. Collective."""
    results = {}
    for name, (model, sizes) in (LAYOUTS if dist.get_world_size() == 2 else PRODUCTS).items():
        for dtype in dtypes:
            results[name, dtype] = curve(device, dtype, "megatron", model, objective, **sizes)
            print(dist.get_rank(), name, dtype, results[name, dtype], flush=True)  # which one a failed run was at
        release()
        dist.barrier()
    return results
