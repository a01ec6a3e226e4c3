"""Rows a second that are tokenised into a store: conversations of the synthetic task, by one or more processes.

python -m apps.sft.benchmarks.tokenising [--rows N] [--processes N]

Wall time, with the start of the processes and the digest of the file.
"""

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from apps.common.data.tokenizer import quiet_libraries
from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import DataConfig
from apps.sft.data import write_demonstrations
from apps.sft.reading.examples import Columns
from apps.sft.reading.tokenized import tokenize_file


def main() -> None:
    """Measure, and print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    quiet_libraries()
    tokenizer = build_tokenizer()
    with TemporaryDirectory() as made:
        path = write_demonstrations(
            DataConfig(task="calculator", demonstrations=options.rows), 0, Path(made, "a.jsonl")
        )
        started, used = time.perf_counter(), time.process_time()
        store = tokenize_file(path, Columns(), tokenizer, None, Path(made, "tokens"), options.processes)
        seconds, used = time.perf_counter() - started, time.process_time() - used
        facts = {"rows": len(store), "tokens": int(store.lengths.sum()), "megabytes": path.stat().st_size / 1e6}
    rates = {
        "rows_per_s": round(facts["rows"] / seconds),
        "rows_per_cpu_s_of_this_process": round(facts["rows"] / used),
    }
    print(json.dumps(facts | {"processes": options.processes, "seconds": round(seconds, 2)} | rates))


if __name__ == "__main__":
    main()
