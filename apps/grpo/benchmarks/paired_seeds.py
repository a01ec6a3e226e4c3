"""Does a run learn as much as TRL's GRPOTrainer, in a third of the time? The same seeds on both sides, in one table.

    pip install trl==1.16.0 accelerate datasets
    PYTHONPATH=.:libs/seqpack:libs/dyncp:libs/chat_tools:libs/objectives:libs/engines:libs/rollout:libs/runlog:\
libs/schedules:libs/runplan python -m apps.grpo.benchmarks.paired_seeds --seeds 0-9 --jobs 16 --out DIR
    python -m apps.grpo.benchmarks.paired_seeds --table DIR...

A pair is a task and a seed: a warm start, then our side and TRL's at once, a process of one thread each
(`paired_sides`), with equal settings (`paired_trl` lists them). DIR/runs.jsonl gets a line as each side ends, so that a
call that is killed loses only what was under way; --resume goes on with the pairs that it lacks. No GPU is used.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASKS = ("quickstart", "tool", "image")
SIDES = ("ours", "trl")
COLUMNS = (
    *("pairs", "ours %", "TRL %", "difference", "lower bound"),
    *("ours s", "TRL s", "time ratio", "steps ratio", "CPU ratio"),
)
"""Of the table: accuracies are in percent, times the means of whole runs; a ratio is TRL's time over ours."""
Row = dict[str, Any]


@dataclass
class Pair:
    """A task and a seed, and the processes that are at work on it."""

    task: str
    seed: int
    folder: Path
    steps: int | None
    begun: float = field(default_factory=time.time)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The words for people."""
        return f"{self.task} {self.seed}"

    @property
    def places(self) -> int:
        """The number of processes that it has, or is about to have: a warm start is followed by two."""
        return len(SIDES) if "warm" in self.processes else len(self.processes)

    def start(self, side: str) -> None:
        """Start the process of a side; what it prints is in the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [self.task, str(self.seed), side, str(self.folder)]
        if self.steps is not None:
            words += ["--steps", str(self.steps)]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with (self.folder / f"{side}.log").open("wb") as log:
            self.processes[side] = subprocess.Popen(
                [sys.executable, "-m", "apps.grpo.benchmarks.paired_sides", *words],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def ended(self) -> list[tuple[str, Row]]:
        """Return the sides that have ended since the last call, each with its result; an error has the log's end."""
        done = []
        for side, process in list(self.processes.items()):
            if process.poll() is None:
                continue
            del self.processes[side]
            found = self.folder / f"{side}.json"
            if process.returncode == 0 and found.is_file():
                row = json.loads(found.read_text())
            else:
                end = (self.folder / f"{side}.log").read_text(errors="replace")[-2000:]
                row = {"task": self.task, "seed": self.seed, "side": side, "error": end}
            done.append((side, row | {"pair": self.begun}))
        return done


def run(flags: argparse.Namespace, work: Path) -> None:
    """Do all pairs, at most `flags.jobs` processes at a time; a pair begins as soon as two more may run."""
    results = flags.out / "runs.jsonl"
    rows = read([flags.out]) if results.is_file() else []
    if rows and not flags.resume:
        sys.exit(f"{results} has results: add --resume, or name another --out")
    known = {(task, seed) for task, seed, _, _ in pairs_of(rows)}
    wanted = [(task, seed) for seed in flags.seeds for task in flags.tasks if (task, seed) not in known]
    waiting, running = deque(wanted), list[Pair]()
    began, last = time.monotonic(), time.monotonic()
    print(f"{len(waiting)} pairs to do, {len(known)} done before", flush=True)
    while waiting or running:
        late = flags.stop_after is not None and time.monotonic() - began > flags.stop_after
        if late and not running:
            break
        while waiting and not late and sum(pair.places for pair in running) + 2 <= max(2, flags.jobs):
            task, seed = waiting.popleft()
            pair = Pair(task, seed, work / f"{task}-{seed}", flags.steps)
            pair.start("warm")
            running.append(pair)
        for pair in list(running):
            for side, row in pair.ended():
                tell(pair, side, row, time.monotonic() - began)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                if side == "warm" and "error" not in row:
                    for each in SIDES:
                        pair.start(each)
            if not pair.processes:
                running.remove(pair)
                shutil.rmtree(pair.folder, ignore_errors=True)
        if time.monotonic() - last > 60:
            last = time.monotonic()
            under_way = ", ".join(f"{pair.name} ({'+'.join(pair.processes)})" for pair in running)
            print(f"{last - began:5.0f} s: {len(waiting)} wait; {under_way}", flush=True)
        time.sleep(0.2)


def tell(pair: Pair, side: str, row: Row, spent: float) -> None:
    """Print what a side came to."""
    if "error" in row:
        print(f"{spent:5.0f} s: {pair.name} {side} FAILED\n{row['error']}", flush=True)
        return
    print(f"{spent:5.0f} s: {pair.name} {side} {100 * row['accuracy']:.1f} % in {row['seconds']:.0f} s", flush=True)


def read(folders: Iterable[Path]) -> list[Row]:
    """Return the lines of results of several folders."""
    files = [folder / "runs.jsonl" for folder in folders]
    return [json.loads(line) for file in files for line in file.read_text().splitlines() if line.strip()]


def pairs_of(rows: Sequence[Row]) -> list[tuple[str, int, Row, Row]]:
    """Return (task, seed, ours, TRL's) of each pair whose two sides ran at once; of several of a length, the first."""
    sides: dict[tuple[str, int, float], dict[str, Row]] = {}
    for row in rows:
        if "error" not in row:
            sides.setdefault((row["task"], row["seed"], row["pair"]), {})[row["side"]] = row
    found: dict[tuple[str, int, int], tuple[str, int, Row, Row]] = {}
    for (task, seed, _), of in sides.items():
        if set(SIDES) <= set(of):
            found.setdefault((task, seed, of["ours"]["steps"]), (task, seed, of["ours"], of["trl"]))
    return list(found.values())


def t_quantile(share: float, freedom: int) -> float:
    """Return the quantile of Student's t, by bisection of its distribution (Simpson's rule).

    `share`: between 0.5 and 1. `freedom`: degrees of freedom.
    """
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def below(end: float, parts: int = 2000) -> float:
        points = [math.pow(1 + (end * i / parts) ** 2 / freedom, -(freedom + 1) / 2) for i in range(parts + 1)]
        total = points[0] + points[-1] + 4 * sum(points[1:-1:2]) + 2 * sum(points[2:-1:2])
        return 0.5 + scale * total * end / parts / 3

    low, high = 0.0, 1000.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) < share else (low, middle)
    return low


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return by task and steps: pairs, mean accuracies, their difference and its lower 95 % bound (paired t), times."""
    out = {}
    pairs = pairs_of(rows)
    for kind in dict.fromkeys((task, ours["steps"]) for task, _, ours, _ in pairs):
        task = "{}, {} steps".format(*kind)
        mine = [(ours, trl) for name, _, ours, trl in pairs if (name, ours["steps"]) == kind]
        differences = [100 * (ours["accuracy"] - trl["accuracy"]) for ours, trl in mine]
        ours_s, trl_s = (sum(pair[side]["seconds"] for pair in mine) / len(mine) for side in (0, 1))
        ours_steps, trl_steps = (sum(pair[side].get("steps_seconds", math.nan) for pair in mine) for side in (0, 1))
        ours_cpu, trl_cpu = (sum(pair[side]["cpu_seconds"] for pair in mine) for side in (0, 1))
        mean = statistics.fmean(differences)
        out[task] = {
            "pairs": len(mine),
            "ours %": 100 * statistics.fmean(ours["accuracy"] for ours, _ in mine),
            "TRL %": 100 * statistics.fmean(trl["accuracy"] for _, trl in mine),
            "difference": mean,
            "ours s": ours_s,
            "TRL s": trl_s,
            "time ratio": trl_s / ours_s,
            "steps ratio": trl_steps / ours_steps,
            "CPU ratio": trl_cpu / ours_cpu,
        }
        if len(mine) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(mine))
            out[task]["lower bound"] = mean - t_quantile(0.95, len(mine) - 1) * error
    return {task: {name: round(value, 2) for name, value in row.items()} for task, row in out.items()}


def table(rows: Sequence[Row]) -> str:
    """Return the summary as a table for people."""
    lines = ["".join([f"{'task':<22}", *(f"{name:>13}" for name in COLUMNS)])]
    for task, row in summary(rows).items():
        lines.append("".join([f"{task:<22}", *(f"{row.get(name, math.nan):>13.2f}" for name in COLUMNS)]))
    return "\n".join(lines)


def seeds(text: str) -> list[int]:
    """Return the seeds of "A-B", or of one number."""
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def main() -> None:
    """Run pairs, or draw the table of some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds, default="0-9", help="A-B, or one")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(TASKS), help=",".join(TASKS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--steps", type=int, help="of both sides, in place of the tasks' own (for a look)")
    parser.add_argument("--out", type=Path, help="where runs.jsonl and summary.json are written")
    parser.add_argument("--resume", action="store_true", help="go on with what --out lacks")
    parser.add_argument("--stop-after", type=float, help="seconds after which no pair begins")
    parser.add_argument("--table", type=Path, nargs="+", metavar="DIR", help="print the table of what is in these")
    flags = parser.parse_args()
    if flags.table:
        print(table(read(flags.table)))
        return
    if flags.out is None or not set(flags.tasks) <= set(TASKS):
        parser.error(f"--out DIR is needed, and --tasks of {', '.join(TASKS)}")
    flags.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="paired_") as work:
        run(flags, Path(work))
    rows = read([flags.out])
    (flags.out / "summary.json").write_text(json.dumps(summary(rows), indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
