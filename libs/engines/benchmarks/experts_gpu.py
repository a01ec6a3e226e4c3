"""Steps of a mixture of experts with the layers of Qwen3.5-35B-A3B: compiled, plain, and stock transformers.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/experts_gpu.py
        [--cases compiled plain stock ...] [--layers N] [--profile] [--device cpu] [--out FILE]

Layers are those of 35B-A3B (256 experts of 512, 8 a token, a shared one; three delta nets, then attention; hidden size
2,048), by default four of them, over a vocabulary of 65,536: 3.4 B parameters, 0.38 B active. A micro-batch is 8,192
packed tokens in the lengths of `step_gpu.py`; a step has one, or four. Stock transformers is under FSDP2 with the same
fused kernels, grouped products of experts, sequence numbers and boundaries. The router's balancing loss is on.

A row says the median of 8 steps, tokens a second, and the share of a peak of 989 Tflop/s in 6 x active parameters x
tokens; `update_ms` is what the optimizer has of it (of ours: all from the last gradient on).
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import step_kinds
import torch
from step_gpu import batch_of, lengths_of
from step_kinds import OUT, attention, clear, inputs_of, say
from torch.nn.functional import cross_entropy

from engines import EngineConfig, build_engine
from engines.fast.compiling import compilations
from engines.launch import launch
from engines.tiny import tiny_batch, tiny_config
from objectives import SFT

PEAK = 989e12
"""Dense bfloat16 operations a second of an H100 or H200 (data sheet)."""
TOKENS = 8192
SHAPE: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": True,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}


def model_of(layers: int, device: str, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig

    config = Qwen3_5MoeTextConfig(**SHAPE, num_hidden_layers=layers)
    if device == "cpu":
        config = tiny_config("moe", router_aux_loss_coef=0.001, output_router_logits=True)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)


def active(net: Any) -> int:
    """Return the parameters that a token is multiplied with: of the experts those that it goes to."""
    text, total = net.config.get_text_config(), 0
    for name, parameter in net.named_parameters():
        share = text.num_experts_per_tok / text.num_experts if ".experts." in name else 1.0
        total += round(parameter.numel() * share)
    return total


def row(what: str, step: Any, tokens: int, parts: dict[str, int], device: str, before: int) -> None:
    graphs = compilations()
    step_kinds.measure(what, step, tokens, device, before, **parts)
    done = OUT[-1]
    operations = 6 * parts["active"] * done["tokens_per_s"]
    say(what="of it", share_of_peak=round(operations / PEAK, 4), compiled=compilations() - graphs)


def ours(what: str, layers: int, device: Literal["cuda", "cpu"], micro_batches: int = 1, **options: Any) -> None:
    before, objective = clear(device), SFT()
    lengths = lengths_of(TOKENS, TOKENS)
    batch = batch_of(lengths * micro_batches) if device == "cuda" else tiny_batch([60, 5, 33, 20] * micro_batches)
    tokens = sum(len(ids) for ids in batch["input_ids"].unbind())
    config = EngineConfig(device=device, lr=1e-5, max_tokens_per_rank=tokens // micro_batches, **options)
    net = model_of(layers, device)
    parts = {"parameters": sum(p.numel() for p in net.parameters()), "active": active(net)}
    engine: Any = build_engine(config, net)
    del net
    seen: dict[str, float] = {}

    def step() -> float:
        engine.prefetch(batch, objective)
        seen.update(engine.train_batch(batch, objective))
        return seen["loss"]

    row(what, step, tokens, parts, device, before)
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    spent = []
    for _ in range(3):
        engine.forward_backward(batch, objective)
        wait()
        began = time.perf_counter()
        engine.optimizer_step()
        wait()
        spent.append((time.perf_counter() - began) * 1e3)
    say(what="of it", update_ms=round(sorted(spent)[1], 1), micro_batches=seen["micro_batches"])
    if PROFILED and device == "cuda":
        profile(step)


def stock(what: str, layers: int, device: str, micro_batches: int = 1) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    before, cuda = clear(device), device == "cuda"
    net = model_of(layers, device, attn_implementation=attention() if cuda else "sdpa").train()
    parts = {"parameters": sum(p.numel() for p in net.parameters()), "active": active(net)}
    vocab, mesh = net.config.vocab_size, init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if cuda else None, reduce_dtype=torch.float32)
    for layer in net.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    lengths = lengths_of(TOKENS, TOKENS) if cuda else [64]
    ids = torch.cat(list(batch_of(lengths)["input_ids"].unbind())).to(device)[None] % vocab
    inputs = inputs_of(lengths, device) if cuda else {}
    mask = torch.cat([torch.arange(n) >= max(1, int(n * 0.3)) for n in lengths]).to(device)[1:]
    update: list[float] = []

    def step() -> float:
        for _ in range(micro_batches):
            out = net(input_ids=ids, use_cache=False, **inputs)
            losses = cross_entropy(out.logits[0, :-1].float(), ids[0, 1:], reduction="none")
            loss = (losses * mask).sum() / mask.sum() + net.config.router_aux_loss_coef * out.aux_loss
            (loss / micro_batches).backward()
        timed = cuda and len(update) >= 11  # after the steps that are measured
        wait: Callable[[], None] = torch.cuda.synchronize if timed else lambda: None
        wait()
        began = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        wait()
        update.append((time.perf_counter() - began) * 1e3)
        return float(loss.detach())

    row(what, step, sum(lengths) * micro_batches, parts, device, before)
    step()
    say(what="of it", update_ms=round(update[-1], 1), micro_batches=micro_batches)
    if PROFILED and cuda:
        profile(step)


def profile(step: Any) -> None:
    """Print where the time of a step goes on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="self_device_time_total", row_limit=30, max_name_column_width=60))


PROFILED = False
COMPILE = {"cuda": "on", "cpu": "auto"}
CASES: dict[str, Any] = {
    "compiled": lambda n, d: ours("compiled", n, d, compile=COMPILE[d]),
    "compiled_sharded": lambda n, d: ours("compiled, FSDP2", n, d, compile=COMPILE[d], weights="sharded"),
    "plain": lambda n, d: ours("plain, FSDP2", n, d, compile="off", weights="sharded"),
    "stock": lambda n, d: stock("stock transformers, FSDP2", n, d),
    "compiled4": lambda n, d: ours("compiled, four micro-batches", n, d, 4, compile=COMPILE[d]),
    "stock4": lambda n, d: stock("stock transformers, FSDP2, four micro-batches", n, d, 4),
}


def main(device: str, cases: list[str], layers: int, profiled: bool, out: str | None) -> None:
    global PROFILED
    PROFILED = profiled
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    say(what="machine", device=name, torch=torch.__version__, steps=step_kinds.STEPS, layers=layers)
    for case in cases:
        CASES[case](layers, device)
        if out:
            Path(out).write_text("\n".join(json.dumps(one) for one in OUT) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    launch(main, (given.device, given.cases, given.layers, given.profile, given.out), device=given.device)
