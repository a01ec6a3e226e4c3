"""Benchmark of a ledger of a million entries: append, open, compact. Run from the repository's root:

PYTHONPATH=libs/rollout:libs/seqpack:libs/chat_tools python libs/rollout/benchmarks/ledger.py
"""

import argparse
import tempfile
import time
from pathlib import Path

from rollout.ledger.ledger import RolloutLedger

BATCH, AHEAD = 512, 512


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--payload", type=int, default=400, help="bytes an entry")
    parser.add_argument("--save-every", type=int, default=100, help="steps of 512 entries between checkpoints")
    options = parser.parse_args()
    steps = options.entries // BATCH
    payload = b"x" * options.payload
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        ledger, fresh, start = RolloutLedger(path), 0, time.perf_counter()
        busy = time.process_time()
        compacting = 0.0
        for step in range(1, steps + 1):
            while fresh < min(steps * BATCH, step * BATCH + AHEAD):
                ledger.started(fresh, step - 1)
                ledger.finished(fresh, payload)
                fresh += 1
            ledger.train(step, range((step - 1) * BATCH, step * BATCH))
            if step % options.save_every == 0:
                at = time.perf_counter()
                ledger.saved(step)
                compacting += time.perf_counter() - at
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
        ledger.close()
        size = path.stat().st_size
        print(f"{fresh:,} entries begun, finished and trained in {seconds:.1f} s: {fresh / seconds:,.0f} a second")
        print(f"  {busy:.1f} s of processor time: {fresh / busy:,.0f} a second of it")
        print(f"  of which checkpoints and compaction {compacting:.1f} s; the file at the end: {size / 2**20:.1f} MiB")
        start = time.perf_counter()
        ledger = RolloutLedger(path)
        print(
            f"opened in {time.perf_counter() - start:.2f} s: {len(ledger.state.done):,} done, "
            f"{len(ledger.state.sampled):,} that a run from the last checkpoint trains again"
        )
        start = time.perf_counter()
        ledger.compact()
        ledger.close()
        print(f"compacted in {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        whole = Path(folder) / "whole"
        with RolloutLedger(whole) as ledger:
            for entry in range(options.entries):
                ledger.started(entry, 0)
                ledger.finished(entry, payload)
        seconds, size = time.perf_counter() - start, whole.stat().st_size
        start = time.perf_counter()
        RolloutLedger(whole).close()
        print(
            f"without a single checkpoint: {options.entries / seconds:,.0f} a second, {size / 2**20:.0f} MiB, "
            f"opened in {time.perf_counter() - start:.2f} s"
        )


if __name__ == "__main__":
    main()
