"""Packed FSDP2 training steps of a hybrid Qwen3.5 on one CUDA device: isolation, tokens/s, peak memory.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/step_gpu.py [--out
    FILE]

The model has 8 layers (6 gated delta net, 2 full attention), hidden size 2048, 0.67 B parameters, random weights.
Lengths are a fixed lognormal mix. Prints one JSON line a row.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.scoring.packed_model import adapt_for_packing, packed_logits
from objectives import GRPO, SFT
from seqpack import Objective
from seqpack.batches.batch import make_batch
from seqpack.ops import backends
from seqpack.testing import check_packing

SHAPE: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
ROWS: list[dict[str, Any]] = []


def say(**facts: Any) -> None:
    ROWS.append(facts)
    print(json.dumps(facts), flush=True)


def model(**changes: Any) -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SHAPE, **changes}))


def lengths_of(total: int, longest: int, seed: int = 0) -> list[int]:
    """Draw lognormal lengths that add up to exactly `total`."""
    rng = torch.Generator().manual_seed(seed)
    out: list[int] = []
    while sum(out) < total:
        draw = int(torch.exp(torch.randn(1, generator=rng) * 0.8 + 6.3))
        out.append(min(max(draw, 16), longest, total - sum(out)))
    return out


def batch_of(lengths: list[int], trained: float = 0.7) -> TensorDict:
    rng = torch.Generator().manual_seed(1)
    samples = []
    for index, length in enumerate(lengths):
        mask = torch.arange(length) >= max(1, int(length * (1 - trained)))
        samples.append(
            {
                "input_ids": torch.randint(0, SHAPE["vocab_size"], (length,), generator=rng),
                "loss_mask": mask,
                "advantages": torch.randn(1, generator=rng) * mask,
                "rollout_log_probs": -11.0 * mask,
                "group": index // 8,
            }
        )
    return make_batch(samples)


def isolation() -> None:
    small = model(num_hidden_layers=4, vocab_size=2048).to("cuda", torch.bfloat16)
    adapt_for_packing(small)
    began = time.perf_counter()
    report = check_packing(small, packed_forward=packed_logits, lengths=(700, 5, 333, 1024))
    say(
        what="isolation, bf16, fused, hidden 2048, 4 layers",
        isolated=report.isolated,
        logits=max(report.logits),
        worst_grad=report.worst_grad,
        moved=report.moved[:1],
        seconds=round(time.perf_counter() - began, 1),
    )


def steps(name: str, tokens: int, cap: int, objective: Objective, count: int = 6, **options: Any) -> None:
    """Time the last `count` of count + 2 steps."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    engine: Any = build_engine(EngineConfig(device="cuda", lr=1e-5, max_tokens_per_rank=cap, **options), model())
    batch = batch_of(lengths_of(tokens, min(cap, 8192)))
    times, losses = [], []
    for _ in range(count + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = engine.train_batch(batch, objective)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
        losses.append(result["loss"])
    best = sorted(times[2:])[count // 2]
    began = time.perf_counter()
    engine.forward(batch)
    torch.cuda.synchronize()
    scoring = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30
    say(
        what=name,
        tokens=int(result["tokens"]),
        sequences=int(result["sequences"]),
        micro_batches=int(result["micro_batches"]),
        fill=round(result["fill"], 3),
        first_step_s=round(times[0], 1),
        step_ms=round(best * 1e3, 1),
        tokens_per_s=round(result["tokens"] / best),
        scoring_ms=round(scoring * 1e3, 1),
        peak_gib=round(peak, 2),
        losses=[round(losses[0], 4), round(losses[-1], 4)],
        parameters=sum(p.numel() for p in engine.executor.model.parameters()),
    )


def main(out: str | None) -> None:
    tables = backends("cuda", torch.bfloat16)
    say(
        what="machine",
        device=torch.cuda.get_device_name(),
        torch=torch.__version__,
        kernels={op: [name for name, there in table.items() if there.available] for op, table in tables.items()},
    )
    isolation()
    steps("SFT, packed, 8k", 8192, 8192, SFT())
    steps("GRPO, packed, 32k in micro-batches of 8k", 32768, 8192, GRPO(off_policy="truncate"))
    steps("GRPO, packed, 32k at once, checkpointing", 32768, 32768, GRPO(), gradient_checkpointing=True)
    steps("SFT, padded, 8k", 8192, 8192, SFT(), count=3, batching="padded")
    if out:
        Path(out).write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out")
    launch(main, (parser.parse_args().out,), device="cuda")
