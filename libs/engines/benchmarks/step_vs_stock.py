"""A whole optimizer step of a hybrid Qwen3.5 on packed tokens: stock transformers under FSDP2 and ours, in one run.

    PYTHONPATH=libs/seqpack:libs/dyncp:libs/objectives:libs/engines python libs/engines/benchmarks/step_vs_stock.py
        [--cases stock fast ...] [--ranks N] [--steps N] [--out FILE]

The model is that of `step_gpu.py` (0.67 B parameters); every rank has `tokens` tokens a step, in the same lengths.
Stock is given the same fused kernels, sequence numbers and boundaries, so that it is right on packed tokens. A row says
the median of 8 steps (`--steps`), what one takes of as many back to back, three times, with the median of these and its
tokens a second, the peak of the device's memory over what was there before, and how many functions were compiled after
the first step.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step_gpu import SHAPE, batch_of, lengths_of, model
from step_kinds import attention, inputs_of
from torch.nn.functional import cross_entropy

from engines import EngineConfig, build_engine
from engines.execution.executor import Scoring
from engines.execution.loss import StepLoss
from engines.fast.compiling import compilations
from engines.launch import launch
from objectives import SFT

STEPS, LOOPS = 8, 3
ROWS: list[dict[str, Any]] = []


def say(**facts: Any) -> None:
    if dist.get_rank() == 0:
        ROWS.append(facts)
        print(json.dumps(facts), flush=True)


def back_to_back(step: Callable[[], Any]) -> float:
    """Return the milliseconds of a step, over `STEPS` steps with no wait between them."""
    dist.barrier()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3 / STEPS


def measure(what: str, step: Callable[[], Any], tokens: int, **facts: Any) -> None:
    """Time `step`, after a first call and two more; peak memory is that of the steady steps."""
    began, graphs = time.perf_counter(), compilations()
    step()
    torch.cuda.synchronize()
    first, made, graphs = time.perf_counter() - began, compilations() - graphs, compilations()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(STEPS):
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    loops = sorted(back_to_back(step) for _ in range(LOOPS))
    loop = loops[LOOPS // 2]
    say(
        what=what,
        ms=round(sorted(times)[STEPS // 2], 1),
        loop_ms=round(loop, 1),
        loops_ms=[round(one, 1) for one in loops],
        fastest_ms=round(min(times), 1),
        tokens_per_s=round(tokens * dist.get_world_size() / loop * 1e3),
        peak_gib=round((torch.cuda.max_memory_allocated() - BEFORE) / 2**30, 2),
        first_s=round(first, 1),
        compiled=made,
        compiled_later=compilations() - graphs,
        **facts,
    )


BEFORE = 0


def clear() -> None:
    global BEFORE
    gc.collect()
    torch.cuda.empty_cache()
    BEFORE = torch.cuda.memory_allocated()


def our_engine(tokens: int, **options: Any) -> Any:
    clear()
    with torch.device("cuda"):
        made = model()
    return build_engine(EngineConfig(device="cuda", lr=1e-5, max_tokens_per_rank=tokens, **options), made)


def ours(what: str, tokens: int, prefetch: bool = True, **options: Any) -> None:
    """Measure a step of our engine on `tokens` tokens of each rank; the next batch is packed meanwhile."""
    cap = tokens if dist.get_world_size() == 1 else tokens + 256  # rows of two ranks are not cut to fit
    engine = our_engine(cap, **options)
    batches = [batch_of(lengths_of(tokens, 8192) * dist.get_world_size()) for _ in range(2)]
    objective = SFT()
    done: list[Any] = [0]

    def step() -> None:
        done[0] += 1
        if prefetch:
            engine.prefetch(batches[done[0] % 2], objective)
        done[1:] = [engine.train_batch(batches[(done[0] + 1) % 2], objective)]

    measure(what, step, tokens)
    last = done[1]
    say(what="of it", **{name: last[name] for name in ("loss", "grad_norm", "tokens", "micro_batches", "fill")})
    if what.startswith("profile"):
        profile(step)


def profile(step: Callable[[], Any], top: int = 40) -> None:
    """Print where the time of a step goes on the device."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    if dist.get_rank() == 0:
        print(seen.key_averages().table(sort_by="self_device_time_total", row_limit=top, max_name_column_width=70))


def host(top: int = 30) -> None:
    """Print what the host does in a step: milliseconds to enqueue each part, and the functions that take the most."""
    import cProfile
    import pstats

    engine = our_engine(8192, compile="on", weights="replicated")
    batch, objective = batch_of(lengths_of(8192, 8192)), SFT()
    spent: dict[str, float] = {}

    def timed(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def call(*args: Any) -> Any:
            began = time.perf_counter()
            result = function(*args)
            spent[name] = spent.get(name, 0.0) + (time.perf_counter() - began) * 1e3 / STEPS
            return result

        setattr(owner, name, call)

    for _ in range(3):
        engine.train_batch(batch, objective)
    timed(engine, "_ready")
    timed(engine.executor, "train")
    timed(engine.executor, "_scores")
    timed(engine.executor, "_inputs")
    timed(engine.executor, "optimizer_step")
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.train_batch(batch, objective)
    whole = (time.perf_counter() - began) * 1e3 / STEPS
    say(what="host", step_ms=round(whole, 1), **{name: round(ms, 1) for name, ms in spent.items()})
    with cProfile.Profile() as seen:
        for _ in range(STEPS):
            engine.train_batch(batch, objective)
    pstats.Stats(seen).sort_stats("tottime").print_stats(top)


def gradients(tokens: int = 8192, **options: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return (loss, float32 gradients on the host) of a step without its update."""
    engine = our_engine(tokens, **options)
    batch = batch_of(lengths_of(tokens, 8192))
    work = engine._agree_on(batch, SFT())
    loss = StepLoss(SFT(), work.stats.totals)
    engine.executor.train(engine._micro_batches(work.batch, work.plan), loss, Scoring())
    shards = {name: p.grad for name, p in engine.executor.scorer.named_parameters()}
    whole = {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).float().cpu() for name, g in shards.items()}
    return float(loss.share(engine.device)), whole


def correctness() -> None:
    """Print gradient errors of the plain and the fast path against float32 and plain torch operations."""
    exact_loss, exact = gradients(dtype="float32", compile="off", weights="sharded")

    def error(grads: dict[str, torch.Tensor]) -> float:
        squares = sum(float((grads[name] - value).double().square().sum()) for name, value in exact.items())
        return float((squares / sum(float(value.double().square().sum()) for value in exact.values())) ** 0.5)

    paths: dict[str, dict[str, Any]] = {
        "plain": {"compile": "off", "weights": "sharded"},
        "fast": {"compile": "on", "weights": "replicated"},
        "fast, FSDP2": {"compile": "on", "weights": "sharded"},
    }
    for what, options in paths.items():
        loss, grads = gradients(**options)
        worst = sorted(((float((grads[n] - g).norm() / g.norm()), n) for n, g in exact.items()), reverse=True)[:3]
        say(what=f"gradient error, {what}", loss=loss, exact_loss=exact_loss, error=round(error(grads), 5), worst=worst)


def stock(what: str, tokens: int, checkpointing: bool = False) -> None:
    """Measure stock transformers under FSDP2, with torch's variable-length attention, packed sequences kept apart."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    clear()
    with torch.device("cuda"):
        torch.manual_seed(0)
        config = Qwen3_5TextConfig(**SHAPE, use_cache=False)
        net = Qwen3_5ForCausalLM._from_config(config, attn_implementation=attention(), dtype=torch.float32).train()
    if checkpointing:
        net.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in net.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)
    lengths = lengths_of(tokens, 8192)
    ids = torch.randint(0, SHAPE["vocab_size"], (1, tokens), device="cuda")
    inputs = inputs_of(lengths, "cuda")
    mask = torch.cat([torch.arange(n) >= max(1, int(n * 0.3)) for n in lengths]).cuda()[1:]

    def step() -> float:
        logits = net(input_ids=ids, use_cache=False, **inputs).logits[0]
        losses = cross_entropy(logits[:-1].float(), ids[0, 1:], reduction="none")
        ((losses * mask).sum() / mask.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(norm)

    measure(what, step, tokens)


CASES: dict[str, Callable[[], None]] = {
    "stock": lambda: stock("stock transformers, FSDP2", 8192),
    "plain": lambda: ours("plain, FSDP2", 8192, compile="off", weights="sharded"),
    "fsdp2": lambda: ours("compiled, FSDP2", 8192, compile="on", weights="sharded"),
    "fsdp2_keep": lambda: ours(
        "compiled, FSDP2, no resharding", 8192, compile="on", weights="sharded", reshard_after_forward=False
    ),
    "fast": lambda: ours("compiled, replicated", 8192, compile="on", weights="replicated"),
    "fast_in_time": lambda: ours(
        "compiled, replicated, packed in time", 8192, prefetch=False, compile="on", weights="replicated"
    ),
    "profile": lambda: ours("profile of compiled, replicated", 8192, compile="on", weights="replicated"),
    "stock32": lambda: stock("stock transformers, FSDP2, 32k, checkpointing", 32768, checkpointing=True),
    "fast32": lambda: ours("compiled, replicated, 32k", 32768, compile="on", weights="replicated"),
    "fast32_checkpointing": lambda: ours(
        "compiled, replicated, 32k, checkpointing",
        32768,
        compile="on",
        weights="replicated",
        gradient_checkpointing=True,
    ),
    "host": host,
    "correctness": correctness,
}


def main(cases: list[str], steps: int, out: str | None) -> None:
    global STEPS
    STEPS = steps
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        a @ a
    torch.cuda.synchronize()
    rate = 10 * 2 * 8192**3 / (time.perf_counter() - began) / 1e12
    del a
    say(
        what="machine",
        device=torch.cuda.get_device_name(),
        ranks=dist.get_world_size(),
        torch=torch.__version__,
        matmul_tf_s=round(rate),
    )
    for case in cases:
        CASES[case]()
        if out and dist.get_rank() == 0:
            Path(out).write_text("\n".join(json.dumps(row) for row in ROWS) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out")
    given = parser.parse_args()
    launch(main, (given.cases, given.steps, given.out), world_size=given.ranks, device="cuda")
