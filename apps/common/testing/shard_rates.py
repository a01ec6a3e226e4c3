"""Seconds of a weight sync shard to shard between machines, as namespaces of this one, beside what the model predicts.

`python -m apps.common.testing.shard_rates` as root prints the values of docs/benchmarks/weight_sync_nodes.json.
"""

import json
import secrets
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from apps.common.testing.machines import machines, missing, start_torchrun
from rollout.workers.authentication import SECRET
from runplan.estimates.sync_time import Phase, sync_seconds

MIB = 64
CASES = [(2, 2, 12), (2, 2, 25), (2, 2, 50), (4, 1, 50), (4, 1, 100)]
"""Machines, samplers, and what a machine can send in Mbit/s."""
SECONDS = 500


def measure(count: int, samplers: int, rate: int, folder: Path) -> list[dict[str, Any]]:
    """Return what each of `count` machines of one rank wrote (`apps.common.testing.timed_shards`).

    Raises:
        RuntimeError: one failed, with its last lines.
    """
    out = folder / "out"
    out.mkdir(parents=True)
    program = ["-m", "apps.common.testing.timed_shards", str(out), str(MIB), str(samplers)]
    env = {SECRET: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    with machines(count, folder, rate=f"{rate}mbit") as every:
        running = start_torchrun(every, 1, 29531, folder, program, dict.fromkeys(range(count), env))
        codes = [process.wait(SECONDS) for process in running]
        if any(codes):
            raise RuntimeError("\n".join(path.read_text()[-2000:] for path in folder.glob("log*")))
    return [json.loads((out / str(rank)).read_text()) for rank in range(count)]


def values() -> dict[str, dict[str, float]]:
    """Return a row for each of the cases: the median seconds and those predicted."""
    rows = {}
    for count, samplers, rate in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(count, samplers, rate, Path(folder))
        busiest = Phase.of_plan((one["sent"], one["taken"]) for one in found)
        who = "a sampler each" if samplers == count else f"{samplers} sampler"
        rows[f"{count} machines, {who}, {rate} Mbit/s"] = {
            "Mbit/s": rate,
            "MB of weights": round(found[0]["weights"] / 1e6, 1),
            "MB sent": round(busiest.sent / 1e6, 2),
            "MB taken": round(busiest.taken / 1e6, 2),
            "measured s": round(statistics.median(found[0]["seconds"]), 2),
            "predicted s": round(sync_seconds([busiest], rate * 1e6 / 8), 2),
        }
    return rows


if __name__ == "__main__":
    if (why := missing()) is not None:
        sys.exit(f"no machines here: {why}")
    sys.stdout.write(json.dumps(values(), indent=1) + "\n")
