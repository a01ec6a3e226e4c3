"""Packing, balancing and micro-batching: seqpack beside TRL and verl, in one process, the same lengths.

    python libs/seqpack/benchmarks/packers.py

Compares with what is installed (pip install trl verl; both without their dependencies will do) and says what is
missing. Times are CPU milliseconds of this process, the least of several runs.
"""

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from seqpack.planning.balancing import balance
from seqpack.planning.bounds import bins_bound, max_part_bound
from seqpack.planning.micro_batches import plan_micro_batches
from seqpack.planning.mixes import MIXES
from seqpack.planning.packing import pack

COUNT, CAPACITY = 16384, 16384


def between(low: float, high: float) -> Callable[[int, int], np.ndarray]:
    return lambda count, longest: np.random.default_rng(0).integers(int(low * longest), int(high * longest) + 1, count)


PACKED = {
    **MIXES,
    "a fifth to a half": between(0.2, 0.5),
    "a quarter to 0.45": between(0.25, 0.45),
    "0.15 to 0.35": between(0.15, 0.35),
}


def timed(call: Callable[[], Any], runs: int = 7) -> tuple[float, Any]:
    best, result = float("inf"), None
    for _ in range(runs):
        start = time.process_time()
        result = call()
        best = min(best, time.process_time() - start)
    return 1000 * best, result


def peer(module: str) -> Any:
    """Return the module; None where it is not installed, and print why."""
    try:
        package = import_module(module)
    except ImportError as error:
        print(f"not compared: {module} ({error})")
        return None
    print(f"compared with {module.split('.')[0]} {version(module.split('.')[0])}")
    return package


def row(*cells: object) -> None:
    print("| " + " | ".join(f"{c:.4f}" if isinstance(c, float) else str(c) for c in cells) + " |")


def packing(trl: Any) -> None:
    print(f"\n## Packing {COUNT} lengths into bins of {CAPACITY}\n")
    row("mix", "packer", "bins", "lower bound", "gap", "ms", "times seqpack")
    row(*["---"] * 7)
    for name, mix in PACKED.items():
        lengths = mix(COUNT, CAPACITY)
        items = lengths.tolist()
        ours, plan = timed(partial(pack, items, CAPACITY))
        bound = bins_bound(np.sort(lengths)[::-1], CAPACITY, len(plan.bins))
        assert max(plan.loads) <= CAPACITY
        row(name, "seqpack", len(plan.bins), bound, f"{plan.gap:.3%}", f"{ours:.1f}", "1.0")
        if trl is not None:
            theirs, gather, bins = trl_packing(trl, lengths)
            cells = (
                bins,
                bound,
                f"{bins / bound - 1:.3%}",
                f"{theirs - gather:.0f}",
                f"{(theirs - gather) / ours:.0f}",
            )
            row(name, "TRL pack_dataset bfd, gathering left out", *cells)


def trl_packing(trl: Any, lengths: np.ndarray) -> tuple[float, float, int]:
    """Return milliseconds of pack_dataset on a column of bytes, those of gathering the tokens alone, and the bins."""
    import pyarrow as pa
    import pyarrow.compute as pc
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()

    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.zeros(int(lengths.sum()), dtype=np.int8)))
    whole = {"batch_size": len(lengths)}  # not in its default blocks of a thousand
    dataset = Dataset(pa.table({"input_ids": column}))
    elapsed, packed = timed(lambda: trl.pack_dataset(dataset, CAPACITY, strategy="bfd", map_kwargs=whole), runs=3)
    order = np.random.default_rng(0).permutation(len(lengths))
    gather, _ = timed(lambda: pc.take(column, pa.array(order)), runs=3)
    return elapsed, gather, len(packed)


def balancing(verl: Any) -> None:
    print("\n## Balancing lognormal costs (sigma 1)\n")
    row("costs", "parts", "equal sizes", "balancer", "max / mean", "max / lower bound", "ms", "times seqpack")
    row(*["---"] * 8)
    for count, parts in ((8192, 128), (256, 8)):
        costs = (np.random.default_rng(0).lognormal(0, 1, count) * 1e6).astype(np.int64)
        items = costs.tolist()
        descending = np.sort(costs)[::-1].astype(np.float64)
        mean = costs.sum() / parts
        for equal in (False, True):
            bound = max_part_bound(descending, parts, equal)
            ours, plan = timed(partial(balance, items, parts, equal))
            largest = max(plan.loads)
            row(count, parts, equal, "seqpack", largest / mean, f"{largest / bound:.5f}", f"{ours:.1f}", "1.0")
            if verl is None:
                continue
            for name, call in (
                ("verl karmarkar_karp", verl.karmarkar_karp),
                ("verl greedy_partition", verl.greedy_partition),
            ):
                theirs, split = timed(partial(call, items, parts, equal), runs=1)
                largest = max(sum(items[i] for i in part) for part in split)
                cells = (largest / mean, f"{largest / bound:.5f}", f"{theirs:.0f}", f"{theirs / ours:.0f}")
                row(count, parts, equal, name, *cells)


def workload(length: int) -> float:
    """Return the cost that verl balances: a dense model of hidden size 4096."""
    return 24576.0 * length + length * length


def micro_batches(verl: Any) -> None:
    samples, cap, ranks = 2048, 32768, 8
    print(f"\n## Micro-batches: {samples} samples over {ranks} ranks, at most {cap} tokens each\n")
    row(
        "mix",
        "planner",
        "micro-batches a rank",
        "least possible",
        "over the cap",
        "lockstep / mean",
        "ms",
        "times seqpack",
    )
    row(*["---"] * 8)
    for name, mix in MIXES.items():
        lengths = mix(samples, CAPACITY)
        items = lengths.tolist()
        least = -(-bins_bound(np.sort(lengths)[::-1], cap, samples) // ranks)
        ours, plan = timed(partial(plan_micro_batches, items, cap, ranks, workload), runs=3)
        planned = {"seqpack": (ours, plan.ranks)}
        if verl is not None:
            planned["verl"] = timed(partial(verl_micro_batches, verl, items, cap, ranks), runs=1)
        for planner, (elapsed, dealt) in planned.items():
            costs = [[sum(workload(items[i]) for i in batch) for batch in rank] for rank in dealt]
            over = sum(sum(items[i] for i in batch) > cap for rank in dealt for batch in rank)
            lockstep = sum(map(max, zip(*costs, strict=True))) * ranks / sum(map(sum, costs))
            row(name, planner, len(dealt[0]), least, over, lockstep, f"{elapsed:.0f}", f"{elapsed / ours:.0f}")


def verl_micro_batches(verl: Any, lengths: list[int], cap: int, ranks: int) -> list[list[list[int]]]:
    """Return verl's two steps: equally many samples a rank, then as many micro-batches as the neediest rank has.

    Batches are of bytes, so that moving tokens costs next to nothing.
    """
    from tensordict import TensorDict

    work = verl.calculate_workload(torch.tensor(lengths)).tolist()
    parts = verl.get_seqlen_balanced_partitions(work, ranks, equal_size=True)
    batches = []
    for part in parts:
        rows = [torch.zeros(lengths[i], dtype=torch.int8) for i in part]
        ids = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        batches.append(TensorDict({"input_ids": ids}, batch_size=[len(part)]))
    dealt = [verl.rearrange_micro_batches(batch, cap)[1] for batch in batches]
    while len({len(rank) for rank in dealt}) > 1:
        most = max(map(len, dealt))
        dealt = [
            rank if len(rank) == most else verl.rearrange_micro_batches(batch, cap, min_num_micro_batch=most)[1]
            for rank, batch in zip(dealt, batches, strict=True)
        ]
    return [[[part[i] for i in batch] for batch in rank] for part, rank in zip(parts, dealt, strict=True)]


def main() -> None:
    print(f"# seqpack, numpy {np.__version__}, torch {torch.__version__}\n")
    trl, verl = peer("trl.data_utils"), peer("verl.utils.seqlen_balancing")
    packing(trl)
    balancing(verl)
    micro_batches(verl)


if __name__ == "__main__":
    main()
