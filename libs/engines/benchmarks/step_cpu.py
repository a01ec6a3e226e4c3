"""One train_batch of the quickstart's size on one CPU thread: 512 sequences of 12 to 20 tokens, a 0.18 M hybrid.

    OMP_NUM_THREADS=1 PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines \
        python libs/engines/benchmarks/step_cpu.py [--profile]
"""

import argparse
import time
from typing import Any, Literal

import torch
from tensordict import TensorDict

from engines import EngineConfig, TrainEngine, build_engine
from engines.launch import launch
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO

SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 128,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
}


def main(profile: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(12, 21, (512,), generator=rng).tolist()
    batch = tiny_batch(lengths).exclude("old_log_probs", "ref_log_probs")
    modes: tuple[Literal["packed", "padded"], ...] = ("packed", "padded")
    for batching in modes:
        engine: Any = build_engine(
            EngineConfig(device="cpu", lr=1e-4, batching=batching), tiny_model(scale=1.0, **SHAPE)
        )
        for _ in range(2):
            engine.train_batch(batch, GRPO())
        times = []
        for _ in range(8):
            began = time.perf_counter()
            engine.train_batch(batch, GRPO())
            times.append(time.perf_counter() - began)
        count = sum(p.numel() for p in engine.executor.model.parameters())
        facts = f"{count / 1e6:.2f} M parameters, {sum(lengths)} tokens in {len(lengths)} sequences"
        print(f"{batching}: {min(times):.3f} s best, {sorted(times)[4]:.3f} s median of 8 ({facts})")
        if profile and batching == "packed":
            show(engine, batch)


def show(engine: TrainEngine, batch: TensorDict) -> None:
    with torch.profiler.profile(record_shapes=True) as recorded:
        engine.train_batch(batch, GRPO())
    rows = sorted(recorded.key_averages(group_by_input_shape=True), key=lambda row: -row.self_cpu_time_total)
    for row in rows[:30]:
        print(
            f"{row.self_cpu_time_total / 1e3:8.2f} ms {row.count:5d}x {row.key[:45]:45s} {str(row.input_shapes)[:90]}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true")
    launch(main, (parser.parse_args().profile,), device="cpu")
