"""Optimizer steps of several model types at true width and few layers: plain, compiled as they are, and as functions.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/compiled_types.py
        [--device cuda|cpu] [--types NAME ...] [--cases plain traced functions] [--layers N] [--tokens N]

One device, bfloat16 over float32 weights on a GPU. The fastest of three steps of SFT after a first one, and the loss of
the last; the peak is over what was there before the engine. On a CPU tiny sizes, to see that it runs.
"""

import argparse
import gc
import json
import time
from typing import Any, Literal

import torch
from transformers import Gemma3TextConfig, LlamaConfig, Olmo2Config, Qwen3Config

from engines import EngineConfig, build_engine
from engines.fast.compiling import compilations
from engines.fast.traced_layers import use_traced_layers
from engines.launch import launch
from engines.tiny import tiny_batch
from objectives import SFT

LENGTHS = (0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.03, 0.02)
"""Shares of the tokens."""
TYPES: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3-8b": (Qwen3Config, {"hidden_size": 4096, "intermediate_size": 12_288, "head_dim": 128}),
    "llama-3-8b": (LlamaConfig, {"hidden_size": 4096, "intermediate_size": 14_336}),
    "olmo-2-7b": (Olmo2Config, {"hidden_size": 4096, "intermediate_size": 11_008}),
    "gemma-3-4b": (Gemma3TextConfig, {"hidden_size": 2560, "intermediate_size": 10_240, "head_dim": 256}),
}
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32_768}
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"vocab_size": 512, "pad_token_id": 0}
CASES: dict[str, Literal["on", "off"]] = {"plain": "off", "traced": "off", "functions": "on"}
"""`compile` of the engine; layers of "traced" are compiled behind it, so that types with functions have both."""


def config_of(name: str, layers: int, cuda: bool) -> Any:
    """Return a type's config with so many layers; tiny off a GPU."""
    kind, sizes = TYPES[name]
    heads = {**HEADS, "num_attention_heads": 8, "num_key_value_heads": 4} if name == "gemma-3-4b" else HEADS
    return kind(**{**heads, **sizes, **({} if cuda else SMALL), "num_hidden_layers": layers})


def measure(device: Any, name: str, case: str, layers: int, tokens: int) -> None:
    """Print a JSON line of a case."""
    cuda = device == "cuda"
    tokens = tokens if cuda else 256
    gc.collect()
    torch.manual_seed(0)
    before, graphs = torch.cuda.memory_allocated() if cuda else 0, compilations()
    config = EngineConfig(device=device, lr=1e-6, max_tokens_per_rank=tokens, compile=CASES[case], recheck_rows=0)
    sizes = config_of(name, layers, cuda)
    engine: Any = build_engine(config, sizes)
    if case == "traced":
        use_traced_layers(engine.executor.model)
    batch, seconds = tiny_batch([int(tokens * share) for share in LENGTHS], vocab=sizes.vocab_size), []
    begun = time.perf_counter()
    losses = [float(engine.train_batch(batch, SFT())["loss"])]
    first = time.perf_counter() - begun
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        begun = time.perf_counter()
        losses.append(float(engine.train_batch(batch, SFT())["loss"]))
        seconds.append(time.perf_counter() - begun)
    facts = {
        "type": name,
        "case": case,
        "layers": layers,
        "ms": round(min(seconds) * 1e3, 1),
        "tokens_s": round(tokens / min(seconds)),
        "peak_gib": round((torch.cuda.max_memory_allocated() - before) / 2**30, 2) if cuda else 0.0,
        "first_s": round(first, 1),
        "graphs": compilations() - graphs,
        "loss": losses[-1],
    }
    print(json.dumps(facts), flush=True)


def main() -> None:
    """Measure the cases, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--types", nargs="+", default=[*TYPES], choices=[*TYPES])
    parser.add_argument("--cases", nargs="+", default=["plain", "traced"], choices=[*CASES])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192)
    options = parser.parse_args()
    for name in options.types:
        for case in options.cases:
            launch(measure, (options.device, name, case, options.layers, options.tokens), 1, options.device)


if __name__ == "__main__":
    main()
