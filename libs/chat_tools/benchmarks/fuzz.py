"""Fuzz the parsers with atheris: no exception, no lost character, a stream gives what the whole gives.

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/fuzz.py --minutes 10

Bytes choose a format, the size of the pieces, and then characters or fragments of the format. It ends with the number
of executions, or with the input that broke a promise.
"""

import argparse
import sys
import tempfile
import time

import atheris

with atheris.instrument_imports(include=["chat_tools"]):
    from chat_tools.fuzzing import check_bytes


def main():
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--corpus", help="a folder to keep found inputs in; a temporary one without it")
    chosen = options.parse_args()
    seconds = int(chosen.minutes * 60)
    corpus = chosen.corpus or tempfile.mkdtemp(prefix="chat_tools_fuzz_")
    count, start = 0, time.monotonic()

    def one(data):
        nonlocal count
        count += 1
        check_bytes(data)
        if time.monotonic() - start >= seconds:
            print(f"{count} executions in {seconds} s: no exception, no lost character, no stream that differs")
            sys.stdout.flush()

    atheris.Setup([sys.argv[0], f"-max_total_time={seconds}", "-max_len=400", "-print_final_stats=1", corpus], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
