"""Curves of two steps that several CUDA devices must share with one: sharded, shared sequences, experts, adapters."""

from typing import Any

import torch.distributed as dist

from engines.build import build_engine
from engines.config import EngineConfig
from engines.replicated import bucket_exchange as exchange
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack.batches.objective import Objective

LENGTHS = [700, 5, 333, 64, 1, 945]
CAP = 1024
"""Number of tokens of all ranks that share a sequence."""
MODES = ["off", "static", "dynamic"]
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "output_router_logits": True,
}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("dense", {}, {}),
    "experts": ("moe", EXPERTS, {}),
    "shared experts": ("moe", EXPERTS, {"expert_parallel": True}),
    "moments on the host": ("dense", {}, {"optimizer_on_host": True, "weights": "sharded"}),
    "parameters on the host": (
        "dense",
        {},
        {"optimizer_on_host": True, "parameters_on_host": True, "weights": "sharded"},
    ),
    "whole": ("dense", {}, {"weights": "replicated"}),
    "copies of shards": ("dense", {}, {"shard_ranks": True}),
    "copies of shards, experts": ("moe", EXPERTS, {"shard_ranks": True}),
}
"""Kind of `tiny_model`, its sizes, the engine's settings; `expert_parallel` over all ranks, two copies of shards."""
# (loss, gradient norm): float32 is plain torch on the device, bfloat16 the fused kernels.
BOUNDS = {"float32": (1e-6, 2e-5), "bfloat16": (2e-3, 5e-3)}
ROUTED = {**BOUNDS, "bfloat16": (1e-2, 5e-2)}
"""Bounds of models with experts: a token whose best experts are nearly equal may go to another one."""
Curve = list[tuple[float, float, float]]
"""Loss, gradient norm, and whether it was skipped, of each step."""


def curve(kind: str, dtype: str, mode: str, cap: int, lengths: list[int], objective: Objective) -> Curve:
    """Return the losses and norms of two steps on all ranks of the process group."""
    model, sizes, settings = KINDS[kind]
    exchange.LARGE = 1 << 14  # of models as small as these, too, some parameters travel by themselves
    world = dist.get_world_size()
    sizes_of_groups = {"expert_parallel": world, "shard_ranks": max(1, world // 2)}
    options = settings | {name: size for name, size in sizes_of_groups.items() if name in settings}
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    config = EngineConfig(
        device="cuda", dtype=dtype, lr=1e-3, eps=1e-2, max_tokens_per_rank=cap,  # type: ignore[arg-type]
        context_parallel=f"static:{world}" if mode == "static" else mode, **options,
    )  # fmt: skip
    built = build_engine(config, tiny_model(model, scale=1.0, **FUSED_SIZES, **sizes))
    vocab = FUSED_SIZES["vocab_size"]
    steps = [built.train_batch(tiny_batch(lengths, seed=seed, vocab=vocab), objective) for seed in range(2)]
    return [(step["loss"], step["grad_norm"], step["skipped"]) for step in steps]


def curves() -> dict[tuple[str, str, str], Curve]:
    """Return every curve by (dtype, mode, kind). Collective."""
    results, world = {}, dist.get_world_size()
    for dtype in BOUNDS:
        for mode in MODES if world > 1 else ["off"]:
            cap = CAP // world if mode != "off" else max(LENGTHS)
            grpo = GRPO(kl_coef=0.1, entropy_coef=0.01)
            results[dtype, mode, "grpo"] = curve("dense", dtype, mode, cap, LENGTHS, grpo)
            # One short sequence: all ranks but one stand by with a row of one token.
            results[dtype, mode, "lonely"] = curve("dense", dtype, mode, cap, [9], SFT())
            for kind in KINDS:
                results[dtype, mode, kind] = curve(kind, dtype, mode, cap, LENGTHS, SFT())
                print(dist.get_rank(), dtype, mode, kind, results[dtype, mode, kind], flush=True)
    return results
