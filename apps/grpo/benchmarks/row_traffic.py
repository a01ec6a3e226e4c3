"""Bytes and seconds of the episodes of a step, from where they were sampled to where they are trained.

`python -m apps.grpo.benchmarks.row_traffic FOLDER [--rows 512] [--tokens 32768] [--rate 1gbit]`, as root: four machines
as namespaces of this one, a rank each. Bytes are those that the kernel counts at each machine's network device. Beside
the exchange of rows stands what it replaces, a gather of all episodes as pickles on every rank. Then the bytes of the
same step are counted by the plan on 4 to 256 ranks.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from apps.common.testing.machines import machines, missing, start_torchrun
from rollout import Episode, Score, Segment
from rollout.episodes.rows import row_columns
from rollout.episodes.summary import EpisodeSummary, encode_summaries, summarize
from schedules.rows.shared import fetch_rows, gather_episodes, summaries_of
from seqpack.comm.row_exchange import columns_of, row_bytes
from seqpack.comm.row_plan import RowPlan
from seqpack.planning.micro_batches import plan_micro_batches

RANKS, GROUP, SECONDS = 4, 8, 500
COUNTED = (4, 16, 64, 256)


def episode(number: int, tokens: int) -> Episode:
    """Return an episode of one stream with this many tokens, a quarter of them its prompt."""
    draw, prompt = random.Random(number), tokens // 4
    sampled = tokens - prompt
    ids = tuple(draw.choices(range(150_000), k=tokens))
    log_probs = (*[0.0] * prompt, *(-(at % 64) / 32 for at in range(sampled)))
    mask, versions = (*[False] * prompt, *[True] * sampled), (*[-1] * prompt, *[7] * sampled)
    stream = Segment(ids, mask, log_probs, versions)
    score = Score(float(number % 3 == 0), {"answer": 1.0})
    timings = {"generate_s": 1.5, "environment_s": 0.5, "total_s": 2.0}
    metrics = {"turns": 1.0}
    return Episode(f"{number}/0", f"task {number}", 0, (stream,), score, "done", timings, None, (), metrics, number)


def holder(number: int, world: int) -> int:
    """Return the rank that samples an episode: the groups are dealt to the ranks."""
    return number // GROUP % world


def uneven(one: EpisodeSummary, count: int) -> list[EpisodeSummary]:
    """Return summaries that differ where those of a run do."""
    draw = random.Random(0)
    return [
        replace(
            one,
            id=f"{number}/0",
            task_id=f"task {number // GROUP}",
            group=number // GROUP,
            score=Score(float(draw.random() < 0.5), {"answer": 1.0}),
            segments=(replace(one.segments[0], nll=draw.random() * 1e4),),
        )
        for number in range(count)
    ]


def wanted_by(lengths: Sequence[int], world: int) -> list[tuple[int, ...]]:
    """Return the rows that each rank trains, by the planner of a step."""
    plan = plan_micro_batches(lengths, max(lengths), world)
    return [tuple(row for rows in parts for row in rows) for parts in plan.ranks]


def sent() -> int:
    """Return the bytes that this machine has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("eth0:")).split(":")[1].split()[8])


def measured(work: Callable[[], Any]) -> tuple[float, int]:
    """Return the seconds of collective work, of the slowest rank, and the bytes that all machines sent for it."""
    dist.barrier()
    before, begun = sent(), time.perf_counter()
    dist.barrier()
    work()
    dist.barrier()
    figures: list[Any] = [None] * dist.get_world_size()
    own = time.perf_counter() - begun, sent() - before
    dist.all_gather_object(figures, own)
    return max(seconds for seconds, _ in figures), sum(nbytes for _, nbytes in figures)


def on_rank(rows: int, tokens: int, out: Path) -> None:
    """Measure both ways on this rank; the first one writes the figures."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = [episode(number, tokens) for number in range(rows) if holder(number, world) == rank]
    few = mine[: len(mine) // 8]
    known, wanted = list[Any](), wanted_by([tokens] * rows, world)
    steps: dict[str, Callable[[], Any]] = {
        "summaries to all": lambda: known.extend(gather_episodes(mine)),
        "rows to those who train them": lambda: fetch_rows(summaries_of(known) or [], wanted),
        "pickles to all, of an eighth of the rows": lambda: dist.all_gather_object([None] * world, few),
    }
    found: dict[str, dict[str, float]] = {}
    for name, work in steps.items():
        seconds, nbytes = measured(work)
        found[name] = {"seconds": round(seconds, 2), "MB sent by all machines": round(nbytes / 1e6, 1)}
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.destroy_process_group()


def counted(rows: int, tokens: int) -> dict[str, dict[str, float]]:
    """Return the bytes of a step by its plan, for several numbers of ranks and for twice the rows."""
    one = episode(0, tokens)
    nbytes = row_bytes(columns_of(row_columns(one.segments[0])))
    found: dict[str, dict[str, float]] = {}
    for count in (rows, 2 * rows):
        summary = len(encode_summaries(uneven(summarize(one, 0), count)))
        for world in COUNTED:
            holders = [holder(row, world) for row in range(count)]
            plan = RowPlan.of(holders, [nbytes] * count, wanted_by([tokens] * count, world))
            most = max(plan.sent_bytes(rank) + plan.received_bytes(rank) for rank in range(world))
            found[f"{count} rows, {world} ranks, counted"] = {
                "MB of rows between ranks": round(plan.total_bytes / 1e6, 1),
                "MB of rows at the busiest rank": round(most / 1e6, 2),
                "MB of summaries at each rank": round(2 * summary / 1e6, 3),
                "MB if all went to all": round((world - 1) * count * nbytes / 1e6, 1),
            }
    return found


def main() -> None:
    """Measure in namespaces, count, and print both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=2**15)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--rank", action="store_true", help="what each machine runs")
    given = parser.parse_args()
    if given.rank:
        on_rank(given.rows, given.tokens, given.folder)
        return
    if (lacks := missing()) is not None:
        raise SystemExit(f"machines as namespaces: {lacks}")
    given.folder.mkdir(parents=True, exist_ok=True)
    out = given.folder.absolute() / "figures.json"
    words = [str(out), "--rank", "--rows", str(given.rows), "--tokens", str(given.tokens)]
    with machines(RANKS, given.folder.absolute(), rate=given.rate) as order:
        program = ["-m", "apps.grpo.benchmarks.row_traffic", *words]
        ranks = start_torchrun(order, 1, 29533, given.folder.absolute(), program)
        codes = [process.wait(SECONDS) for process in ranks]
    if any(codes):
        raise SystemExit(f"ranks ended with {codes}: see {given.folder}/log*")
    sys.stdout.write(json.dumps(json.loads(out.read_text()) | counted(given.rows, given.tokens), indent=1) + "\n")


if __name__ == "__main__":
    main()
