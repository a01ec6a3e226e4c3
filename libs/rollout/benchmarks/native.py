"""Throughput of the native engine: PYTHONPATH=libs/rollout OMP_NUM_THREADS=1 python libs/rollout/benchmarks/native.py

A 0.18M hybrid, 64 prompts of 8 to 12 tokens in groups of 8, at most 8 new tokens, as the quickstart samples them.
"""

import argparse
import random
import statistics
import time

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from rollout.engine import Sampling
from rollout.native import NativeEngine


def build(hidden: int, vocab: int) -> Qwen3_5ForCausalLM:
    head = hidden // 4
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head, full_attention_interval=2,
        linear_key_head_dim=head, linear_value_head_dim=head, linear_num_key_heads=4,
        linear_num_value_heads=4, max_position_embeddings=2048, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    )  # fmt: skip
    return Qwen3_5ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=300)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    flags = parser.parse_args()
    model = build(flags.hidden, flags.vocab).to(flags.device)
    rng = random.Random(0)
    distinct = [[rng.randrange(flags.vocab) for _ in range(rng.randint(8, 12))] for _ in range(flags.prompts)]
    prompts = [p for p in distinct for _ in range(flags.group)]
    engine = NativeEngine(model, max_batch=len(prompts))
    sampling = Sampling(max_new_tokens=flags.new_tokens)
    times, cpu = [], []
    for _ in range(flags.repeats + 1):
        began, busy = time.perf_counter(), time.process_time()
        done = engine.generate_batch(prompts, sampling)
        times.append(time.perf_counter() - began)
        cpu.append(time.process_time() - busy)
    tokens = sum(len(c.ids) for c in done)
    median = statistics.median(times[1:])
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters on {flags.device}, {len(prompts)} rows")
    print(f"first call {times[0]:.3f} s; then median {median:.3f} s, best {min(times[1:]):.3f} s")
    spent = statistics.median(cpu[1:])
    print(f"{tokens / median:,.0f} tokens/s at the median")
    print(f"{spent:.3f} s of processor time a call: {tokens / spent:,.0f} tokens/s on a core of its own")


if __name__ == "__main__":
    main()
