"""What a router's balancing loss costs a step: without it, with a pass that counts, and with forward passes ahead; and
a scoring pass with the step after it, which counts anew, or takes the counts of the scoring pass.

    python libs/engines/benchmarks/router_pass.py [--megatron]

Of Megatron also with a pass that counts all micro-batches, as under pipeline stages.

CPU seconds of this process, medians of turns in which each case takes a step; the result is printed as JSON.
"""

import json
import statistics
import sys
import time
from dataclasses import replace
from typing import Any, cast

import torch
import transformers

from engines import EngineConfig, TrainEngine, build_engine
from engines.launch import ensure_group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [100] * 12
TURNS = 9
SHAPE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "vocab_size": 1024,
}
CASES: dict[str, dict[str, Any]] = {
    "no balancing loss": {"router_aux_loss_coef": 0.0},
    "a pass that counts": {"router_aux_loss_coef": 0.1, "router_forwards_ahead": 0},
    "all forward passes ahead": {"router_aux_loss_coef": 0.1, "router_forwards_ahead": 100},
}
SCORED = "scored before, a pass that counts", "scored before, its counts"
CASES |= dict.fromkeys(SCORED, CASES["a pass that counts"])
MEGATRON = "--megatron" in sys.argv
if MEGATRON:
    CASES["a pass that counts all"] = CASES["a pass that counts"]


def build(micro_batches: int, recompute: bool, case: str) -> TrainEngine:
    """Return an engine whose step takes so many micro-batches."""
    tokens = sum(LENGTHS) // micro_batches
    config = EngineConfig(
        device="cpu", max_tokens_per_rank=tokens, recheck_rows=0, gradient_checkpointing=recompute, **CASES[case]
    )
    if not MEGATRON:
        return build_engine(config, tiny_model("moe", **SHAPE))
    engine: Any = build_engine(replace(config, backend="megatron"), tiny_model("moe", **SHAPE))
    if case == "a pass that counts all":
        engine.executor._run_ahead = -1
    return cast("TrainEngine", engine)


def measured(micro_batches: int, recompute: bool) -> dict[str, float]:
    """Return the CPU seconds of a step by case, and the shares over a step without the loss."""
    engines = {case: build(micro_batches, recompute, case) for case in CASES}
    batch = tiny_batch(LENGTHS, vocab=1024)
    times: dict[str, list[float]] = {case: [] for case in CASES}
    for turn in range(TURNS + 1):
        for case, engine in engines.items():
            begun = time.process_time()
            if case in SCORED:
                engine.forward(batch)
            if case == SCORED[0]:
                cast("Any", engine).scored_counts = None
            metrics = engine.train_batch(batch, SFT())
            assert metrics["micro_batches"] == micro_batches
            if turn:
                times[case].append(time.process_time() - begun)
    medians = {case: statistics.median(seconds) for case, seconds in times.items()}
    first = medians["no balancing loss"]
    return {
        **{f"{case}, seconds": round(median, 4) for case, median in medians.items()},
        **{
            f"{case}, more": round(median / first - 1, 3)
            for case, median in medians.items()
            if case not in ("no balancing loss", *SCORED)
        },
        f"{SCORED[1]}, less": round(1 - medians[SCORED[1]] / medians[SCORED[0]], 3),
    }


def main() -> None:
    """Print the result."""
    ensure_group("cpu")
    torch.set_num_threads(1)
    values = {
        f"{count} micro-batches{', layers recomputed' * again}": measured(count, again)
        for count in (2, 6)
        for again in (False, True)
    }
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "device": "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": " ".join(["python libs/engines/benchmarks/router_pass.py", *sys.argv[1:]]),
        "what": f"CPU seconds of a step{' under Megatron' * MEGATRON} of a mixture of 4 layers and 8 experts, width "
        f"128, 1,200 tokens: medians of {TURNS} turns in one run, beside other work.",
        "values": values,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
