"""Steps of GRPO on a model of Qwen3-0.6B's shape: tokens a second, and the peak of the allocator, by settings.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/qwen3_step.py
        [--device cuda|cpu] [--cases NAME ...]

One device, rows of 384 tokens of which a third is the prompt; bfloat16 over float32 weights. The fastest of three steps
after a first one; the peak is over what was there before the engine. On a CPU tiny sizes, to see that it runs.
"""

import argparse
import gc
import json
import time
from typing import Any

import torch
from transformers import Qwen3Config

from engines import EngineConfig, build_engine
from engines.launch import launch
from engines.tiny import tiny_batch
from objectives import GRPO

SHAPE: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
SMALL: dict[str, Any] = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
ROW = 384
OFF: dict[str, Any] = {"compile": "off"}
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (16_384, 42, {}),
    "compiled": (16_384, 126, {}),
    "wide": (32_768, 255, {}),
    "recomputed": (16_384, 126, {"gradient_checkpointing": True}),
    "plain": (16_384, 126, OFF),
    "sharded": (16_384, 126, {"weights": "sharded"}),
}
"""Tokens of a micro-batch, rows of a step, and settings by name."""


def measure(device: Any, name: str) -> None:
    """Print a JSON line of a case."""
    tokens, rows, settings = CASES[name]
    shape, cuda = SHAPE, device == "cuda"
    if not cuda:
        shape, tokens, rows = SHAPE | SMALL, 1024, 4
    gc.collect()
    before = torch.cuda.memory_allocated() if cuda else 0
    engine = build_engine(
        EngineConfig(device=device, lr=1e-6, max_tokens_per_rank=tokens, **settings), Qwen3Config(**shape)
    )
    batch, seconds = tiny_batch([ROW] * rows, vocab=shape["vocab_size"]), []
    metrics = engine.train_batch(batch, GRPO())
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        begun = time.perf_counter()
        engine.train_batch(batch, GRPO())
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    facts = {
        "case": name,
        "micro_batches": metrics["micro_batches"],
        "tokens_s": round(ROW * rows / min(seconds)),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2) if cuda else 0.0,
        "compiled": engine.state_summary()["compiled"],
    }
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Measure the cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--cases", nargs="+", default=[*CASES], choices=[*CASES])
    options = parser.parse_args()
    for name in options.cases:
        launch(measure, (options.device, name), 1, options.device)


if __name__ == "__main__":
    main()
