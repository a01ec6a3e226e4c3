"""Static against dynamic context parallelism: a hybrid model under FSDP2, forward and backward, random weights.

    python -m torch.distributed.run --standalone --nproc-per-node 4 libs/dyncp/benchmarks/train_speed.py
    ... train_speed.py --tiny        the same code path on the CPU over gloo, seconds

Prints markdown, section by section, as soon as each is known: the fitted cost model, then for every workload and plan
tokens a second, model FLOPs use, peak memory, and predicted against measured time. There is no optimizer step in the
times.
"""

import argparse
import os
import statistics
import time
from dataclasses import dataclass, replace
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from hybrid_model import TINY, Config, HybridModel
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dyncp.calibrate.calibration import calibrate_groups
from dyncp.comm.process_groups import ProcessGroups
from dyncp.planning.cost import CostModel, Topology
from dyncp.planning.methods import Method
from dyncp.planning.planner import plan, predicted_seconds, static_plan
from dyncp.planning.types import DynamicPlan
from dyncp.sharding.layout import Sharding
from dyncp.sharding.shards import pack_group, shard
from seqpack.batches.batch import make_batch

PEAK_FLOPS = 989e12


@dataclass
class Bench:
    """The machine, the model and the measurements so far."""

    config: Config
    model: HybridModel
    device: torch.device
    groups: ProcessGroups
    cap: int
    align: int
    repeats: int
    cost: CostModel
    begin: float

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def say(self, *lines: str) -> None:
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def clock(self) -> str:
        return f"{time.time() - self.begin:.0f} s since start"


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ids, positions, targets, sharding, group
Prepared = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Sharding, dist.ProcessGroup | None]


def prepare(bench: Bench, the_plan: DynamicPlan) -> list[Prepared]:
    """Return every step's (ids, positions, targets, sharding, group) of this rank, on the device, as a loader would."""
    bench.groups.prepare(the_plan)
    generator = torch.Generator().manual_seed(1)
    samples = []
    for n in the_plan.lengths:
        ids = torch.randint(0, bench.config.vocab, (n,), generator=generator)
        has_next = torch.arange(n) < n - 1
        samples.append({"input_ids": ids, "next_ids": ids.roll(-1), "has_next": has_next})
    batch = make_batch(samples)
    prepared = []
    for step in the_plan.steps:
        mine = step.group_of(bench.rank)
        packed = pack_group(batch, mine.sample_ids, mine.cp_size, the_plan.layout, the_plan.align)
        part = shard(packed, mine.ranks.index(bench.rank), mine.cp_size, the_plan.layout)
        trained = part.values["has_next"] if mine.sample_ids else torch.zeros_like(part.values["has_next"])
        targets = part.values["next_ids"].where(trained, -100)
        tensors = (part.values["input_ids"], part.position_ids, targets)
        ids, positions, targets = (t.to(bench.device) for t in tensors)
        prepared.append((ids, positions, targets, part.sharding, bench.groups.get(mine.ranks)))
    return prepared


def run_plan(bench: Bench, the_plan: DynamicPlan, prepared: list[Prepared], each: bool) -> tuple[list[float], float]:
    """Return (seconds of every step, loss). each: wait for the device after each step; else time all at once."""
    model, scale = bench.model, dist.get_world_size() / the_plan.trained_tokens
    assert isinstance(model, FSDPModule)
    synchronize(bench.device)
    dist.barrier()
    seconds, begin, total = [], time.perf_counter(), torch.zeros((), device=bench.device)
    for index, (ids, positions, targets, sharding, group) in enumerate(prepared):
        model.place.sharding, model.place.group, model.place.method = sharding, group, the_plan.method
        model.set_requires_gradient_sync(index == len(prepared) - 1)
        loss = model(ids, positions, targets)
        (loss * scale).backward()
        total += loss.detach()
        if each:
            synchronize(bench.device)
            seconds.append(time.perf_counter() - begin)
            begin = time.perf_counter()
    synchronize(bench.device)
    if not each:
        seconds.append(time.perf_counter() - begin)
    model.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    longest = torch.tensor(seconds, dtype=torch.float64, device=bench.device if bench.device.type == "cuda" else "cpu")
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist(), total.item() / the_plan.trained_tokens


def plan_seconds(bench: Bench, the_plan: DynamicPlan) -> float:
    """Return the median seconds of a plan, after a first run that tunes kernels."""
    prepared = prepare(bench, the_plan)
    run_plan(bench, the_plan, prepared, each=False)
    return statistics.median(run_plan(bench, the_plan, prepared, each=False)[0][0] for _ in range(bench.repeats))


def measure(bench: Bench, name: str, the_plan: DynamicPlan) -> str:
    """Return one line of a table."""
    prepared = prepare(bench, the_plan)
    run_plan(bench, the_plan, prepared, each=False)
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, loss = [], 0.0
    for _ in range(bench.repeats):
        seconds, loss = run_plan(bench, the_plan, prepared, each=False)
        times.append(seconds[0])
    each, _ = run_plan(bench, the_plan, prepared, each=True)
    peak = torch.tensor(
        [torch.cuda.max_memory_allocated() if bench.device.type == "cuda" else 0.0], dtype=torch.float64
    )
    peak = peak.to(bench.device)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    total, predicted = statistics.median(times), predicted_seconds(the_plan, bench.cost)
    errors = [abs(p - m) / m for p, m in zip(predicted, each, strict=True)]
    tokens, flops = sum(the_plan.lengths), bench.config.model_flops(list(the_plan.lengths))
    mfu = flops / total / PEAK_FLOPS / dist.get_world_size()
    sizes = sorted({group.cp_size for _, group in the_plan.groups()})
    return (
        f"| {name} | {the_plan.name} | {len(the_plan.steps)} | {sizes} | {tokens / total:,.0f} | {mfu:.1%} | "
        f"{peak.item() / 2**30:.1f} | {total * 1e3:.0f} | {sum(predicted) * 1e3:.0f} | "
        f"{sum(predicted) / total - 1:+.1%} | {statistics.mean(errors):.1%} | {loss:.5f} |"
    )


HEADER = [
    "| plan | candidate | steps | CP sizes | tokens/s | MFU | peak GiB | ms | predicted | error | step error | loss |",
    "|---" * 12 + "|",
]


def lengths_of(count: int, typical: float, spread: float, longest: int, seed: int) -> list[int]:
    """Return long-tailed lengths, `longest` among them."""
    drawn = np.random.default_rng(seed).lognormal(np.log(typical), spread, count)
    return [longest, *np.clip(drawn, max(2, typical // 64), longest).astype(int).tolist()[1:]]


def calibrate(bench: Bench, methods: list[Method]) -> None:
    world = dist.get_world_size()
    sizes = list(range(1, world + 1)) if world <= 4 else [n for n in (1, 2, 4, 8) if world % n == 0]
    bench.cost = calibrate_groups(
        lambda p: plan_seconds(bench, p), bench.cost, world, bench.cap, sizes, methods, align=bench.align
    )
    bench.say(
        f"\n## Fitted cost model ({bench.clock()})\n",
        "| method | size | base ms | us/token | ps/pair |",
        "|---" * 5 + "|",
    )
    bench.say(
        *(f"| {m} | {s} | {b * 1e3:.2f} | {t * 1e6:.3f} | {p * 1e12:.2f} |" for m, s, b, t, p in bench.cost.measured)
    )


def compare(bench: Bench, title: str, lengths: list[int], cap: int, sizes: list[int], methods: list[Method]) -> None:
    world = dist.get_world_size()
    bench.say(
        f"\n## {title} ({bench.clock()})\n",
        f"{len(lengths)} sequences, {sum(lengths):,} tokens, {min(lengths)}-{max(lengths)}, cap {cap} tokens a rank\n",
        *HEADER,
    )
    for method in methods:
        for size in (size for size in sizes if world % size == 0):
            static = static_plan(lengths, world, cap, size, bench.cost, Topology(), method, align=bench.align)
            bench.say(measure(bench, f"static {size}, {method}", static))
        chosen = plan(lengths, world, cap, bench.cost, Topology(), method, align=bench.align)
        bench.say(measure(bench, f"dynamic, {method}", chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU over gloo")
    parser.add_argument("--delta-backend", default="auto", help="backend of the gated delta rule")
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    begin = time.time()
    if arguments.tiny:
        dist.init_process_group("gloo", timeout=timedelta(minutes=2))
        torch.set_num_threads(1)
        device, config, cap, align, policy = torch.device("cpu"), TINY, 64, 16, MixedPrecisionPolicy()
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device, config, cap, align = torch.device("cuda", torch.cuda.current_device()), Config(), 8192, 128
        dist.init_process_group("nccl", timeout=timedelta(minutes=9), device_id=device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    with torch.device(device):
        model = HybridModel(config)
    parameters = sum(p.numel() for p in model.parameters())
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.place.backend = arguments.delta_backend
    bench = Bench(config, model, device, ProcessGroups(), cap, align, arguments.repeats, config.cost(400e12), begin)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    bench.say(f"# {dist.get_world_size()} x {name}, torch {torch.__version__}, {parameters / 1e9:.3f} B parameters")
    calibrate(bench, ["ulysses"])
    tail = cap * dist.get_world_size()
    short = lengths_of(arguments.sequences, cap / 4, 1.0, cap, seed=0)
    long = lengths_of(arguments.sequences, cap / 4, 1.2, tail, seed=1)
    compare(bench, "The cap binds: lengths to 4 x cap", long, cap, [4], ["ulysses"])
    compare(bench, "Everything fits one rank: lengths to the cap", short, cap, [1, 2, 4], ["ulysses"])
    compare(bench, "No cap to speak of: the long lengths at 4 x cap a rank", long, tail, [1], ["ulysses"])
    measured = bench.cost.measured
    calibrate(bench, ["ring", "all_gather"])
    bench.cost = replace(bench.cost, measured=bench.cost.measured + measured)
    compare(bench, "The cap binds, other methods", long, cap, [4], ["ring", "all_gather"])
    bench.say(f"\nDone ({bench.clock()}).")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
