"""Replay length traces on any number of ranks: the time of static sizes and dynamic plans under a cost model."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dyncp.planning.cost import CostModel, Topology
from dyncp.planning.methods import Method
from dyncp.planning.planner import make_problem, plan, static_plan
from dyncp.planning.sizes import Layout

TRACES = ("lognormal", "bimodal", "uniform")


@dataclass(frozen=True)
class Replay:
    """The outcome on one number of ranks, all batches together.

    static: seconds by size; only sizes that could run every batch. chosen: how often each candidate won.
    """

    ranks: int
    sequences: int
    tokens: int
    dynamic: float
    static: dict[int, float]
    chosen: dict[str, int]

    @property
    def best_static(self) -> int | None:
        """The static size with the least time; None where none can run."""
        return min(self.static, key=lambda size: self.static[size], default=None)

    @property
    def speedup(self) -> float:
        """Time of the best static size over that of the dynamic plans; at least 1 under the model."""
        best = self.best_static
        return self.static[best] / self.dynamic if best is not None else float("inf")


def trace_lengths(trace: str, count: int, longest: int, seed: int = 0) -> list[int]:
    """Return `count` lengths: lognormal (median longest / 16, sigma 1.2), bimodal (nine tenths short), uniform; or
    those of a JSON file with a list of lengths, repeated as often as needed and cut to `longest`."""
    rng = np.random.default_rng(seed)
    if trace == "lognormal":
        drawn = rng.lognormal(np.log(longest / 16), 1.2, count)
    elif trace == "bimodal":
        drawn = np.where(rng.random(count) < 0.9, rng.normal(longest / 32, longest / 100, count), longest * 0.8)
    elif trace == "uniform":
        drawn = rng.uniform(1, longest, count)
    elif Path(trace).is_file():
        known = json.loads(Path(trace).read_text())
        drawn = np.resize(np.asarray(known, dtype=np.float64), count)
    else:
        raise ValueError(f"trace {trace!r} is neither a file nor one of {', '.join(TRACES)}")
    result: list[int] = np.clip(drawn, 1, longest).astype(int).tolist()
    return result


def replay(
    batches: Sequence[Sequence[int]],
    ranks: int,
    cap: int,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
) -> Replay:
    """Plan every batch (one optimizer step each) dynamically and with every static size; add up the predicted times."""
    dynamic, static, chosen = 0.0, dict[int, float](), dict[str, int]()
    arguments = (cost, topology, method, layout)
    possible = _common_sizes(batches, ranks, cap, arguments)
    for lengths in batches:
        made = plan(lengths, ranks, cap, *arguments)
        dynamic += sum(made.seconds)
        chosen[made.name] = chosen.get(made.name, 0) + 1
        for size in possible:
            fixed = static_plan(lengths, ranks, cap, size, *arguments)
            static[size] = static.get(size, 0.0) + sum(fixed.seconds)
    return Replay(ranks, sum(map(len, batches)), sum(map(sum, batches)), dynamic, static, chosen)


def _common_sizes(
    batches: Sequence[Sequence[int]],
    ranks: int,
    cap: int,
    arguments: tuple[CostModel | None, Topology | None, Method, Layout],
) -> list[int]:
    """Return the powers of two (and the world) that hold every sequence of every batch."""
    longest = [max(max(lengths) for lengths in batches)]
    sizes = make_problem(longest, ranks, cap, *arguments).static_sizes
    return [size for size in sizes if size & (size - 1) == 0 or size == ranks]


def simulate(
    ranks: Sequence[int],
    cap: int,
    trace: str = "lognormal",
    sequences_per_rank: int = 8,
    longest: int = 0,
    batches: int = 2,
    cost: CostModel | None = None,
    topology: Topology | None = None,
    method: Method = "ring",
    layout: Layout = "contiguous",
) -> Iterator[Replay]:
    """Yield one Replay for each number of ranks. longest: of the trace; 4 x cap where 0, never more than the world
    holds."""
    for count in ranks:
        top = min(longest or 4 * cap, count * cap)
        drawn = [trace_lengths(trace, count * sequences_per_rank, top, seed) for seed in range(batches)]
        yield replay(drawn, count, cap, cost, topology, method, layout)


def markdown(replays: Sequence[Replay]) -> str:
    """Return the replays as a table."""
    lines = [
        "| ranks | sequences | tokens/s | best static | its time | dynamic | speed-up | chosen |",
        "|---" * 8 + "|",
    ]
    for r in replays:
        best = r.best_static
        fixed = f"CP {best} | {r.static[best] * 1e3:.1f} ms" if best is not None else "none fits | -"
        chosen = ", ".join(f"{name} x{count}" for name, count in sorted(r.chosen.items()))
        lines.append(
            f"| {r.ranks} | {r.sequences} | {r.tokens / r.dynamic:,.0f} | {fixed} | {r.dynamic * 1e3:.1f} ms | "
            f"{r.speedup:.2f} | {chosen} |"
        )
    return "\n".join(lines)
