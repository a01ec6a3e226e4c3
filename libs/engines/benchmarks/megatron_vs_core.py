"""Our Megatron backend beside megatron-core's own packed path: tokens/s, memory, and gradients from the same weights.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/megatron_vs_core.py
        --device cuda [--side ours|core] [--head-dim 128] [--ranks 2 [--tensor-parallel 2]] [--optimizer torch]

A whole optimizer step on one device over the same packed (THD) tokens of the hybrid in `step_gpu.py` (0.67 B
parameters, bfloat16, float32 masters). `core` is megatron-core's GPTModel in Transformer Engine's layer specification
with its gated delta net, fused rotary embedding, SwiGLU and cross entropy, its DistributedDataParallel and optimizer
(Transformer Engine's FusedAdam), over `PackedSeqParams`; `ours` is `backend="megatron"`. Both begin with the weights
of one seed, so that the loss and gradients before the first update are set side by side at the end.

Each side is a process of its own: the failure of one is printed in full and the other's rows stand; then the exit
status is 1. `core` needs CUDA, Transformer Engine, flash-linear-attention and megatron-core 0.19. `--head-dim 128` has
both sides take twice the heads of half the size, for attention kernels that know no 256. `--device cpu` runs our side
in tiny sizes, and shows that the command works, not how fast.

`--ranks 2` runs both sides on two devices: each rank has packed tokens of its own, or with `--tensor-parallel 2` half
of the model (sequence parallel) and the same tokens. Tokens/s are those of all ranks; memory, parameters and gradients
are the first one's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import step_gpu
import torch
from versus_core import core
from versus_steps import CLIP, EPS, LR, TINY, Run, batch_of, in_use, keep, measure, say

from engines import EngineConfig, build_engine
from engines.execution.executor import Scoring
from engines.execution.loss import StepLoss
from engines.launch import launch
from objectives import SFT

SIDES = ("ours", "core")


def ours(run: Run) -> None:
    """Measure our backend."""
    batch, objective = batch_of(run), SFT()
    before, net = in_use(run), step_gpu.model()
    # With no slack at all the planner finds no even split over ranks in one go, and takes two micro-batches.
    cap = run.tokens if run.copies == 1 else run.tokens * 9 // 8
    config = EngineConfig(
        backend="megatron",
        device=run.device,
        lr=LR,
        eps=EPS,
        grad_clip=CLIP,
        max_tokens_per_rank=cap,
        tensor_parallel=run.tensor_parallel,
        megatron_optimizer=run.optimizer,
    )
    engine: Any = build_engine(config, net)
    del net
    work = engine._agree_on(batch, objective)
    loss = StepLoss(objective, work.stats.totals)
    engine.executor.train(engine._micro_batches(work.batch, work.plan), loss, Scoring())
    parameters = [(one.held.name, one.parameter) for one in engine.executor.parameters]
    gradients = {name: p.main_grad.float().cpu().reshape(p.shape) for name, p in parameters}
    keep(run, "ours", loss.start(engine.groups.plan)()["loss"], gradients)
    del gradients, loss, work

    def step() -> dict[str, float]:
        engine.prefetch(batch, objective)
        result = engine.train_batch(batch, objective)
        return {name: result[name] for name in ("loss", "grad_norm", "micro_batches")}

    updated = engine.state_summary()["optimizer"]
    measure(run, "ours", step, before, parameters=sum(p.numel() for _, p in parameters), optimizer=updated)


def compare(folder: Path) -> None:
    """Print the losses and gradients of both sides before the first update, side by side."""
    one, other = (torch.load(folder / f"{side}.pt") for side in SIDES)
    rows, squares, total = [], 0.0, 0.0
    for name, value in other["gradients"].items():
        apart = one["gradients"][name] - value
        squares, total = squares + float(apart.double().square().sum()), total + float(value.double().square().sum())
        relative = float(apart.norm()) / max(float(value.norm()), 1e-30)
        rows.append((round(relative, 5), float(apart.abs().max()), name))
    rows.sort(reverse=True)
    say(
        what="the same weights, before any update",
        losses=[one["loss"], other["loss"]],
        gradient_relative_difference=round((squares / total) ** 0.5, 6),
        largest_absolute_difference=max(row[1] for row in rows),
        worst_parameters=rows[:4],
    )


def side(name: str, run: Run) -> None:
    """Run one side on each of its ranks."""
    step_gpu.SHAPE.update(run.shape)  # here, as a spawned rank has the module anew
    {"ours": ours, "core": core}[name](run)


def installed(package: str) -> str | None:
    """Return the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def parsed() -> argparse.Namespace:
    """Return the command's options; exit where they cannot be combined."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--tokens", type=int, default=None, help="a step of each copy of the model")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--head-dim", type=int, choices=[128, 256], default=256)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--optimizer", choices=["auto", "torch", "core"], default="auto", help="of our side")
    parser.add_argument("--folder", help="where gradients are kept; a temporary one where it is left out")
    args = parser.parse_args()
    if args.ranks < 1 or args.tensor_parallel < 1 or args.ranks % args.tensor_parallel:
        parser.error(f"--tensor-parallel {args.tensor_parallel} does not divide --ranks {args.ranks}")
    return args


def run_of(args: argparse.Namespace, folder: Path) -> Run:
    """Return the settings that both sides share."""
    shape: dict[str, Any] = {}
    if args.device == "cpu":
        shape = TINY
    elif args.head_dim == 128:
        rope = {**step_gpu.SHAPE["rope_parameters"], "partial_rotary_factor": 0.5}
        shape = {"head_dim": 128, "num_attention_heads": 16, "num_key_value_heads": 4, "rope_parameters": rope}
    tokens = args.tokens or (8192 if args.device == "cuda" else 192)
    return Run(args.device, tokens, args.steps, folder, args.ranks, args.tensor_parallel, shape, args.optimizer)


def main() -> int:
    """Run one side, or both as processes and compare them; return 1 where one failed."""
    args = parsed()
    with tempfile.TemporaryDirectory(prefix="versus_") as temporary:
        folder = Path(args.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if args.side:
            launch(side, (args.side, run_of(args, folder)), world_size=args.ranks, device=args.device)
            return 0
        packages = ("megatron-core", "transformer_engine", "fla-core", "torch", "transformers")
        say(what="versions", **{name: installed(name) for name in packages})
        failed = []
        for name in SIDES if args.device == "cuda" else SIDES[:1]:
            again = [sys.executable, __file__, *sys.argv[1:], "--side", name, "--folder", str(folder)]
            if (code := subprocess.run(again, env=os.environ, check=False).returncode) != 0:
                say(side=name, failed=code)
                failed.append(name)
        if not failed and args.device == "cuda":
            compare(folder)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
