"""The process that compares answers with math-verify: a line of JSON in, a line of JSON out.

It is a process of its own since comparing a model's answer can take for ever or all memory (`9^{9^{9^9}}`), in code
that no thread can interrupt: math-verify's own time limits are signals, for the main thread alone, and are off here.
LaTeX is parsed by a grammar; math-verify's other extraction, which evaluates an answer as Python, is not used. Of what
a model wrote sympy evaluates the digits of its numbers (`Float ('0.5')`), and no other text (a test listens).

1. The process imports and warms up once, then forks: the child answers requests until the input ends.
2. The kernel ends a child that has computed for too long or needs too much memory.
3. Then the response is: not equal; and the next child is forked, which costs milliseconds.
"""

import json
import logging
import mmap
import os
import resource
import signal
import sys
from functools import lru_cache
from typing import Any, NoReturn

from math_verify import LatexExtractionConfig, parse, verify

MEMORY_BYTES = 4 << 30


def equal(answer: str, found: str) -> bool:
    """Return whether two answers in LaTeX are the same number or expression; units are ignored."""
    return bool(verify(_read(answer), _read(found), timeout_seconds=None))


@lru_cache(maxsize=256)
def _read(text: str) -> list[Any]:
    settings = [LatexExtractionConfig(boxed_match_priority=0)]
    found: list[Any] = parse(f"\\boxed{{{text}}}", settings, parsing_timeout=None)
    return found


def main(seconds: float) -> None:
    """Answer requests until the input ends; each may compute for `seconds`."""
    logging.disable(logging.CRITICAL)  # math-verify warns that its time limits are off
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    equal(r"\frac{1}{2}", "0.5")  # the first use loads modules, which must not count
    print(json.dumps({"ready": True}), flush=True)
    busy = mmap.mmap(-1, 1)  # shared with the child: 1 while it computes
    while True:
        child = os.fork()
        if not child:
            _serve(seconds, busy)
        if os.waitpid(child, 0)[1] == 0:
            return
        if busy[0]:
            busy[0] = 0
            print(json.dumps({"equal": False, "ended": "it took too long or too much memory"}), flush=True)


def _serve(seconds: float, busy: mmap.mmap) -> NoReturn:
    """Answer requests in the child until the input ends."""
    for line in sys.stdin:
        busy[0] = 1
        signal.setitimer(signal.ITIMER_PROF, seconds)  # by default it ends the process, even inside C code
        request = json.loads(line)
        try:
            answer: dict[str, bool | str] = {"equal": equal(request["answer"], request["found"])}
        except MemoryError:
            os._exit(1)
        except Exception as error:  # noqa: BLE001  what cannot be compared is not equal
            answer = {"equal": False, "error": f"{type(error).__name__}: {error}"[:500]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        busy[0] = 0
        print(json.dumps(answer), flush=True)
    os._exit(0)
