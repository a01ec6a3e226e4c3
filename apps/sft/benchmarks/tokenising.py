"""Rows a second that are tokenised into a store, beside `datasets.map` over the same file in the same run.

python -m apps.sft.benchmarks.tokenising [--rows N] [--task NAME] [--processes N]

Conversations of a synthetic task. `datasets.map` calls `apply_chat_template` a row at a time as TRL does: for ids
alone, and for ids and the assistant's mask, which is what a store holds. CPU seconds of this process and those that it
starts, and wall time, the medians of three turns, with reading the file and the start of the processes.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from apps.common.data.tokenizer import quiet_libraries
from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import DataConfig
from apps.sft.data import write_demonstrations
from apps.sft.reading.examples import Columns
from apps.sft.reading.tokenized import tokenize_file

TURNS = 3


def tokenised(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, masked: bool) -> dict[str, Any]:
    """Return the ids of a row, with the assistant's mask where asked for."""
    more = {"return_assistant_tokens_mask": True} if masked else {}
    out = tokenizer.apply_chat_template(
        row["messages"], tools=row["tools"] or None, tokenize=True, return_dict=True, **more
    )
    return {name: out[name] for name in ("input_ids", "assistant_masks") if name in out}


def mapped(path: Path, tokenizer: PreTrainedTokenizerBase, processes: int, masked: bool, cache: Path) -> int:
    """Tokenise a file by `datasets.map`; return its rows."""
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(cache))
    function = partial(tokenised, tokenizer=tokenizer, masked=masked)
    return len(rows.map(function, num_proc=processes if processes > 1 else None, remove_columns=rows.column_names))


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    """Measure, and print a line a side and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--task", choices=["arithmetic", "calculator"], default="calculator")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    quiet_libraries()
    datasets.disable_progress_bars()
    tokenizer, processes = build_tokenizer(), options.processes
    with TemporaryDirectory() as made:
        data = DataConfig(task=options.task, demonstrations=options.rows)
        path = write_demonstrations(data, 0, Path(made, "a.jsonl"))
        sides: dict[str, Callable[[Path], int]] = {
            "ours": lambda folder: len(tokenize_file(path, Columns(), tokenizer, None, folder, processes)),
            "map, ids": lambda folder: mapped(path, tokenizer, processes, False, folder),
            "map, ids and mask": lambda folder: mapped(path, tokenizer, processes, True, folder),
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        rows = 0
        for turn in range(TURNS):
            for name, side in sides.items():
                started, used = time.perf_counter(), cpu_seconds()
                rows = side(Path(made, f"{name}{turn}"))
                seconds[name].append((cpu_seconds() - used, time.perf_counter() - started))
        megabytes = path.stat().st_size / 1e6
    medians = {name: [statistics.median(kind) for kind in zip(*times, strict=True)] for name, times in seconds.items()}
    facts: dict[str, Any] = {"rows": rows, "megabytes": round(megabytes, 1), "processes": processes}
    for name, (used, passed) in medians.items():
        times = {"cpu_s": round(used, 2), "seconds": round(passed, 2), "rows_per_cpu_s": round(rows / used)}
        print(json.dumps(facts | {"side": name} | times))
    for name in ("map, ids", "map, ids and mask"):
        ratios = [ours / theirs for ours, theirs in zip(medians["ours"], medians[name], strict=True)]
        print(f"ours takes {ratios[0]:.2f} times the CPU time of {name}, and {ratios[1]:.2f} times the wall time")


if __name__ == "__main__":
    main()
