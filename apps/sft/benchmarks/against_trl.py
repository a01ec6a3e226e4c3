"""This app's steps against TRL's SFTTrainer: the same model, rows, order, optimizer and budget, in one run.

    python -m apps.sft.benchmarks.against_trl [--device cpu|cuda] [--case NAME ...] [--steps N]
        [--trl NAME ...] [--out FILE] (trl, datasets and accelerate on the path)

Each side has a process of its own, in which ours sets what the app sets (threads, collector, freed memory).
Both take rows that are tokenised already, in the same order and with the same mask, and a constant rate, and clip at 1.
Both are timed from the end of one step to the end of the next, from rows to loss, so with collation; TRL logs every
step, as our loop does. On a CPU: one thread, float32, the process's own seconds, so that a busy machine matters
little. On a GPU: float32 weights and bfloat16 arithmetic on both sides (TRL's by autocast, its default), the kernels of
flash-linear-attention and causal-conv1d for both where they are installed, wall time. The losses are printed side by
side: the curves are to be equal, but for TRL's "packing", whose steps have other rows.
"""

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist

from apps.common.data.tokenizer import quiet_libraries
from apps.common.run.ranks import init_rank
from apps.sft.benchmarks.setting import CASES, VARIANTS, Curve, Stopwatch, Task, hybrid
from apps.sft.loop import fit
from apps.sft.reading.samples import batch_of
from engines import build_engine
from objectives import SFT

BUILDS = {**CASES, "gpu": hybrid}


def side(name: str, case: str, count: int, threads: int) -> Curve:
    """Train `count` steps of a case on one side, in this process."""
    quiet_libraries()
    torch.set_num_threads(threads)
    with TemporaryDirectory() as made:
        task = BUILDS[case](Path(made), count)
        if name == "ours":
            return ours(task, threads)
        from apps.sft.benchmarks.trl_side import train

        return train(task, name, Path(made) / "trl")


def ours(task: Task, threads: int) -> Curve:
    """Train with this app's loop; return losses and times."""
    init_rank(threads, 0)
    engine = build_engine(replace(task.engine, model=str(task.model)))
    watch, losses = Stopwatch(task.engine.device), []
    for _, metrics in fit(engine, lambda step: batch_of(task.steps[step]), SFT(), len(task.steps), ahead=True):
        losses.append(metrics["loss"])
        watch.mark()
    peak = watch.peak_gib()
    dist.destroy_process_group()
    return Curve(losses, task.tokens, watch.seconds, peak)


def measure(case: str, count: int, threads: int, variants: list[str]) -> dict[str, Curve]:
    """Return every side's curve, ours first; print a line for each as it ends."""
    curves: dict[str, Curve] = {}
    for name in ("ours", *variants):
        with ProcessPoolExecutor(1, get_context("spawn")) as own:
            curve = curves[name] = own.submit(side, name, case, count, threads).result()
        facts: dict[str, Any] = {
            "median_step_ms": round(1e3 * sorted(curve.seconds[3:])[len(curve.seconds[3:]) // 2], 1)
        }
        facts |= {"tokens_per_s": round(curve.rate()), "peak_gib": round(curve.peak_gib, 2), "steps": len(curve.losses)}
        facts |= {"first_s": round(curve.seconds[0], 1), "losses": [round(curve.losses[i], 4) for i in (0, -1)]}
        print(json.dumps({"what": name} | facts), flush=True)
    return curves


def table(curves: dict[str, Curve], count: int) -> None:
    """Print the curves side by side, and the ratio of our rate to TRL's."""
    left = curves["ours"]
    print("| step | " + " | ".join(curves) + " |\n| --- |" + " --- |" * len(curves))
    for step in range(0, count, max(1, count // 10)):
        cells = (f"{c.losses[step]:.4f}" if step < len(c.losses) else "" for c in curves.values())
        print(f"| {step + 1} | " + " | ".join(cells) + " |")
    for name, curve in curves.items():
        if name == "ours":
            continue
        ratio = f"{left.rate() / curve.rate():.2f} times TRL's tokens/s ({name})"
        if "packing" in VARIANTS[name]:
            print(ratio + "; its steps have other rows")
        else:
            worst = max(abs(a - b) for a, b in zip(left.losses, curve.losses, strict=True))
            print(f"{ratio}; largest difference of a loss {worst:.1e}")


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=None, help="on a CPU; by default short")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--trl", nargs="+", choices=list(VARIANTS), default=None, help="ways to run TRL")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.steps < 5:
        raise SystemExit("--steps must be at least 5: the first three are not timed")
    if options.device == "cuda" and torch.cuda.device_count() != 1:
        raise SystemExit("set CUDA_VISIBLE_DEVICES to one GPU: TRL takes all that it sees")
    threads = 1 if options.device == "cpu" else torch.get_num_threads()
    variants = options.trl or (["no checkpointing"] if options.device == "cpu" else list(VARIANTS))
    if options.device == "cuda" and options.case:
        raise SystemExit("--case is of a CPU: leave it out with --device cuda")
    every = {}
    for name in ["gpu"] if options.device == "cuda" else options.case or ["short"]:
        print(f"\n{name}", flush=True)
        curves = measure(name, options.steps, threads, variants)
        table(curves, options.steps)
        every[name] = {side: asdict(curve) for side, curve in curves.items()}
    if options.out:
        options.out.write_text(json.dumps(every))


if __name__ == "__main__":
    main()
