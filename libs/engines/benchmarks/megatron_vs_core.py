"""Our Megatron backend beside megatron-core's own packed path: tokens/s, memory, and gradients from the same weights.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/megatron_vs_core.py
        --device cuda [--side ours|core] [--head-dim 128]

A whole optimizer step on one device over the same packed (THD) tokens of the hybrid in `step_gpu.py` (0.67 B
parameters, bfloat16, float32 masters). `core` is megatron-core's GPTModel in Transformer Engine's layer specification
with its gated delta net, fused rotary embedding, SwiGLU and cross entropy, its DistributedDataParallel and optimizer
(Transformer Engine's FusedAdam), over `PackedSeqParams`; `ours` is `backend="megatron"`. Both begin with the weights
of one seed, so that the loss and gradients before the first update are set side by side at the end.

Each side is a process of its own: the failure of one is printed in full and the other's rows stand; then the exit
status is 1. `core` needs CUDA, Transformer Engine, flash-linear-attention and megatron-core 0.19. `--head-dim 128` has
both sides take twice the heads of half the size, for attention kernels that know no 256. `--device cpu` runs our side
in tiny sizes, and shows that the command works, not how fast.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import step_gpu
import torch
from torch import Tensor

from engines import EngineConfig, build_engine
from engines.execution.executor import Scoring
from engines.execution.loss import StepLoss
from engines.launch import launch
from engines.megatron.bridge import held_by
from engines.megatron.peer_names import FUSED
from engines.megatron.sizes import ModelSizes
from engines.parallel.layout import ParallelLayout
from objectives import SFT

TINY = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SIDES = ("ours", "core")
LR, CLIP, EPS = 1e-5, 1.0, 1e-8
"""Of both optimizers; their other settings are EngineConfig's defaults."""


@dataclass(frozen=True)
class Run:
    """What both sides are given: `tokens` a step, `steps` that are timed, the folder for gradients."""

    device: str
    tokens: int
    steps: int
    folder: Path


def say(**facts: Any) -> None:
    """Print a row."""
    print(json.dumps(facts), flush=True)


def lengths(run: Run) -> list[int]:
    """The lengths of the packed sequences."""
    return step_gpu.lengths_of(run.tokens, run.tokens)


def synchronize(run: Run) -> None:
    """Wait for the device."""
    if run.device == "cuda":
        torch.cuda.synchronize()


def measure(run: Run, side: str, step: Callable[[], dict[str, float]], before: int, **facts: Any) -> None:
    """Time `step` after a first call and two more, and print its row; `before`: bytes in use before the engine was."""
    began = time.perf_counter()
    step()
    synchronize(run)
    first = time.perf_counter() - began
    for _ in range(2):
        step()
    synchronize(run)
    if run.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(run.steps):
        began = time.perf_counter()
        last = step()
        synchronize(run)
        times.append(time.perf_counter() - began)
    middle = sorted(times)[run.steps // 2]
    peak = torch.cuda.max_memory_allocated() - before if run.device == "cuda" else 0
    say(
        side=side,
        step_ms=round(middle * 1e3, 2),
        fastest_ms=round(min(times) * 1e3, 2),
        tokens=run.tokens,
        tokens_per_s=round(run.tokens / middle),
        peak_gib=round(peak / 2**30, 2),
        first_s=round(first, 1),
        **last,
        **facts,
    )


def in_use(run: Run) -> int:
    """Bytes of the device that are in use."""
    gc.collect()
    return torch.cuda.memory_allocated() if run.device == "cuda" else 0


def keep(run: Run, side: str, loss: float, gradients: dict[str, Tensor]) -> None:
    """Save what the first step has before its update: the mean loss and gradients by our names of parameters."""
    say(side=side, before_any_update=True, loss=loss)
    torch.save({"loss": loss, "gradients": gradients}, run.folder / f"{side}.pt")


def ours(run: Run) -> None:
    """Our backend."""
    batch, objective = step_gpu.batch_of(lengths(run)), SFT()
    before, net = in_use(run), step_gpu.model()
    config = EngineConfig(
        backend="megatron", device=run.device, lr=LR, eps=EPS, grad_clip=CLIP, max_tokens_per_rank=run.tokens
    )
    engine: Any = build_engine(config, net)
    del net
    work = engine._agree_on(batch, objective)
    loss = StepLoss(objective, work.facts.totals)
    engine.executor.train(engine._micro_batches(work.batch, work.plan), loss, Scoring())
    parameters = [(one.held.name, one.parameter) for one in engine.executor.parameters]
    gradients = {name: p.main_grad.float().cpu().reshape(p.shape) for name, p in parameters}
    keep(run, "ours", float(loss.share(engine.device)), gradients)
    del gradients, loss, work

    def step() -> dict[str, float]:
        engine.prefetch(batch, objective)
        result = engine.train_batch(batch, objective)
        return {name: result[name] for name in ("loss", "grad_norm")}

    measure(run, "ours", step, before, parameters=sum(p.numel() for _, p in parameters))


def core(run: Run) -> None:
    """megatron-core's own model, gradient buffers and optimizer."""
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec as hybrid_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    if run.device != "cuda":
        raise SystemExit("megatron-core's own layers need CUDA: --side ours runs on a CPU")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    net = step_gpu.model()
    text = net.config
    before, config = in_use(run), core_config(text)
    made = GPTModel(
        config,
        hybrid_spec(config),
        text.vocab_size,
        run.tokens,
        share_embeddings_and_output_weights=text.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_percent=step_gpu.SHAPE["rope_parameters"]["partial_rotary_factor"],
        rotary_base=int(step_gpu.SHAPE["rope_parameters"]["rope_theta"]),
    ).cuda()
    names = fill(made, net)
    del net
    half = Float16Module(config, made)
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), half)
    config.finalize_model_grads_func = finalize_model_grads
    defaults = EngineConfig()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=LR,
            min_lr=LR,
            weight_decay=defaults.weight_decay,
            adam_beta1=defaults.betas[0],
            adam_beta2=defaults.betas[1],
            adam_eps=EPS,
            clip_grad=CLIP,
            bf16=True,
            params_dtype=torch.bfloat16,
        ),
        [ddp],
        use_gloo_process_groups=False,
    )
    forward_step, trained = forward_of(run)

    def accumulate() -> float:
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        said = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([None]),
            model=[ddp],
            num_microbatches=1,
            seq_length=run.tokens,
            micro_batch_size=1,
            forward_only=False,
        )
        return float(said[0]["sum"]) / trained

    def step() -> dict[str, float]:
        loss = accumulate()
        updated, norm, _ = optimizer.step()
        if not updated:
            raise RuntimeError("megatron-core's optimizer skipped a step")
        return {"loss": loss, "grad_norm": float(norm)}

    loss = accumulate()
    gradients = {ours: p.main_grad.float().cpu().reshape(p.shape) for ours, p in names.items()}
    keep(run, "core", loss, gradients)
    del gradients
    measure(run, "core", step, before, parameters=sum(p.numel() for p in names.values()))


def core_config(text: Any) -> Any:
    """megatron-core's TransformerConfig of the hybrid, with the fusions that its training scripts turn on."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        num_attention_heads=text.num_attention_heads,
        num_query_groups=text.num_key_value_heads,
        kv_channels=text.head_dim,
        ffn_hidden_size=text.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=text.rms_norm_eps,
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        attention_output_gate=True,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=[int(kind == "linear_attention") for kind in text.layer_types],
        linear_conv_kernel_dim=text.linear_conv_kernel_dim,
        linear_key_head_dim=text.linear_key_head_dim,
        linear_value_head_dim=text.linear_value_head_dim,
        linear_num_key_heads=text.linear_num_key_heads,
        linear_num_value_heads=text.linear_num_value_heads,
        transformer_impl="transformer_engine",
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        apply_rope_fusion=True,
        cross_entropy_loss_fusion=True,
        gradient_accumulation_fusion=False,  # its output layer asks apex for that
    )


def forward_of(run: Run) -> tuple[Callable[..., Any], int]:
    """The step's forward function over the packed tokens of `ours`, and how many of them are trained."""
    from megatron.core.packed_seq_params import PackedSeqParams

    sizes = lengths(run)
    batch = step_gpu.batch_of(sizes)
    ids = batch["input_ids"].values().to(run.device)
    mask = batch["loss_mask"].values().to(run.device)
    edges = torch.tensor([0, *sizes]).cumsum(0).to(run.device, torch.int32)
    positions = torch.cat([torch.arange(size) for size in sizes]).to(run.device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=max(sizes),
        max_seqlen_kv=max(sizes),
    )
    # A sequence's first token is never trained, so no label reaches over a boundary.
    labels, trained = ids.roll(-1), mask.roll(-1)
    trained[-1] = False
    count = trained.sum().int()

    def loss(values: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (values.reshape(-1).float() * trained).sum()
        return total, count.clone(), {"sum": total.detach().clone()}

    def forward_step(iterator: Iterator[None], model: Any) -> tuple[Tensor, Callable[..., Any]]:
        next(iterator)
        output = model(ids[None], positions[None], None, labels=labels[None], packed_seq_params=packed)
        return output, loss

    return forward_step, int(count)


@torch.no_grad()
def fill(made: torch.nn.Module, net: Any) -> dict[str, torch.nn.Parameter]:
    """Give `made` the weights of a transformers model: its parameters by our names. RuntimeError where names differ.

    Transformer Engine has a norm inside the linear after it; and its gated delta net's norm, as all others, is kept as
    the distance from one.
    """
    sizes, stock = ModelSizes.of(net.config), net.state_dict()
    live, found = dict(made.named_parameters()), {}
    for held in held_by(sizes, ParallelLayout(), 0, ((len(sizes.layer_types),),)):
        name = next((name for name in (held.name, *fused(held.name)) if name in live), None)
        if name is None:
            raise RuntimeError(f"megatron-core's model has no {held.name}; it has {sorted(live)}")
        value = torch.zeros(held.shape)
        for piece in held.pieces:
            value[piece.place.index] = stock[piece.tensor][piece.source.index].reshape(piece.place.size).float()
        if name.endswith("out_norm.weight"):
            value -= 1
        parameter = live.pop(name)
        if parameter.shape != value.shape:
            raise RuntimeError(f"{name} has shape {tuple(parameter.shape)}, not {tuple(value.shape)}")
        parameter.copy_(value)
        found[held.name] = parameter
    if live:
        raise RuntimeError(f"parameters of megatron-core's model that got no weights: {sorted(live)}")
    return found


def fused(name: str) -> list[str]:
    """Where Transformer Engine's specification may have a norm."""
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return []
    plain = ".".join(["decoder", "layers", "*", *parts[3:]])
    return [other.replace("*", parts[2]) for other, own in FUSED.items() if own == plain]


def compare(folder: Path) -> None:
    """Set the losses and gradients of both sides before the first update side by side."""
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
    """One side, in this process."""
    {"ours": ours, "core": core}[name](run)


def installed(package: str) -> str | None:
    """The version of a package, None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def main() -> int:
    """Run one side, or both as processes and set them side by side: 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--tokens", type=int, default=None)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--head-dim", type=int, choices=[128, 256], default=256)
    parser.add_argument("--folder", help="where gradients are kept; a temporary one where it is left out")
    given = parser.parse_args()
    if given.device == "cpu":
        step_gpu.SHAPE.update(TINY)
    elif given.head_dim == 128:
        step_gpu.SHAPE.update(head_dim=128, num_attention_heads=16, num_key_value_heads=4)
        step_gpu.SHAPE["rope_parameters"] = {**step_gpu.SHAPE["rope_parameters"], "partial_rotary_factor": 0.5}
    tokens = given.tokens or (8192 if given.device == "cuda" else 192)
    with tempfile.TemporaryDirectory(prefix="versus_") as temporary:
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if given.side:
            launch(side, (given.side, Run(given.device, tokens, given.steps, folder)), device=given.device)
            return 0
        packages = ("megatron-core", "transformer_engine", "fla-core", "torch", "transformers")
        say(what="versions", **{name: installed(name) for name in packages})
        failed = []
        for name in SIDES if given.device == "cuda" else SIDES[:1]:
            again = [sys.executable, __file__, *sys.argv[1:], "--side", name, "--folder", str(folder)]
            if (code := subprocess.run(again, env=os.environ, check=False).returncode) != 0:
                say(side=name, failed=code)
                failed.append(name)
        if not failed and given.device == "cuda":
            compare(folder)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
