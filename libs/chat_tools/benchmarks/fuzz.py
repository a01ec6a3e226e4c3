"""Fuzz the parsers with atheris: no exception, no lost character, a stream gives what the whole gives.

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/fuzz.py --minutes 10

Bytes choose a format, the size of the pieces, and then characters or fragments of the format. It ends with the number
of executions ("Done N runs"), or with the input that broke a promise. In every other execution text counts as too
dense very soon, so that this is tried on short texts too.
"""

import argparse
import sys
import tempfile

import atheris  # type: ignore[import-untyped]

with atheris.instrument_imports(include=["chat_tools"]):
    from chat_tools.parsing import cursor
    from chat_tools.testing.fuzzing import check_bytes

SCAN_BUDGET = cursor.SCAN_BUDGET


def one(data: bytes) -> None:
    cursor.SCAN_BUDGET = 50 if data[1:2] > b"\x7f" else SCAN_BUDGET
    check_bytes(data)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--corpus", help="a folder to keep found inputs in; a temporary one without it")
    chosen = options.parse_args()
    seconds = int(chosen.minutes * 60)
    corpus = chosen.corpus or tempfile.mkdtemp(prefix="chat_tools_fuzz_")
    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=400", "-print_final_stats=1", corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
