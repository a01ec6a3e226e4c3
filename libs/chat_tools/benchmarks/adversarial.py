"""Search for the texts that cost the parsers most, and time a megabyte of the worst in each format.

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/adversarial.py --seconds 20

A text is a turn that breaks off somewhere, a unit repeated, and the rest of the turn (or of another place in it). Units
are pairs and triples of the format's markers and of bits of values; random ones are tried and the worst changed
further, at 4,000 characters each. The worst of them and of the known ones (`testing.fuzzing`) are then measured
at a million characters: processor time, the least of the rounds, whole and fed in pieces of 16 characters.
"""

import argparse
import os
import random
import time

from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.testing.fuzzing import FRAGMENTS, TOOLS, WORST, Repeated
from chat_tools.testing.samples import write_turn

VALUES = ["1,", "'',", '"",', "[],", "[1],", "(),", "(1,),", "True,", "null,", "+1,", ".5,", "1e999,", "{},", "a:1,"]
VALUES += ["'\\n',", "'a':1,", '"a":1,', '"\0":1,', "'\0':1,", "a\0=1,", "[[],", "{1:", "''''''", "x", "\0", ";", "//"]
ARGUMENTS = {"text": "x", "count": 2, "items": [1, "a"], "options": {"mode": "a"}}


def turns(name: str) -> list[str]:
    """Return turns between whose beginnings and ends units are put; with single quotes where a literal is allowed."""
    texts = [write_turn(name, [("f", ARGUMENTS), ("g", {})], "hi", "hm"), write_turn(name, [("f", ARGUMENTS)])]
    return [*texts, *(text.replace('"', "'") for text in texts if '"' in text)]


class Search:
    """A search: random units first, then changes of the worst ones."""

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.random = name, random.Random(seed)
        self.parts = [*FRAGMENTS[name], *VALUES]
        self.turns = turns(name)
        self.found: dict[Repeated, float] = {}

    def made(self) -> Repeated:
        """Make a text of random parts."""
        turn = self.random.choice(self.turns)
        at = self.random.randint(0, len(turn)) if self.random.random() < 0.8 else 0
        after = self.random.randint(at, len(turn)) if self.random.random() < 0.7 else len(turn)
        unit = "".join(self.random.choices(self.parts, k=self.random.randint(1, 3)))
        return Repeated(turn[:at], unit, turn[after:], self.random.random() < 0.5)

    def changed(self, text: Repeated) -> Repeated:
        """Change one thing in a text."""
        other = self.made()
        what = self.random.choice(["begin", "unit", "unit", "unit", "end", "typed", "shorter", "both"])
        if what == "begin":
            return text._replace(begin=other.begin)
        if what == "both":
            return text._replace(begin=other.begin, end=other.end)
        if what == "end":
            return text._replace(end=other.end)
        if what == "typed":
            return text._replace(typed=not text.typed)
        at = self.random.randint(0, len(text.unit))
        if what == "shorter":
            return text._replace(unit=text.unit[:at] + text.unit[at + 1 :] or "a")
        return text._replace(unit=text.unit[:at] + self.random.choice(self.parts) + text.unit[at:])

    def try_one(self, text: Repeated, size: int) -> None:
        """Measure a text, if it is new, and record its cost a character."""
        if text not in self.found and len(text.unit) < 60:
            whole = text.of(size)
            seconds = min(cost(self.name, whole, text.typed) for _ in range(2))
            self.found[text] = seconds / len(whole)

    def run(self, seconds: float, size: int = 4000) -> list[Repeated]:
        """Return the worst texts, the worst first."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if len(self.found) > 150 and self.random.random() < 0.7:
                self.try_one(self.changed(self.random.choice(self.best(12))), size)
            else:
                self.try_one(self.made(), size)
        return self.best(4)

    def best(self, count: int) -> list[Repeated]:
        """List the worst so far."""
        return sorted(self.found, key=self.found.__getitem__, reverse=True)[:count]


def cost(name: str, text: str, typed: bool, piece: int = 0) -> float:
    """Return the processor time of one parse, whole or fed in pieces."""
    tools = TOOLS if typed else None
    start = time.process_time()
    if piece:
        parser = StreamParser(name, tools)
        for at in range(0, len(text), piece):
            parser.feed(text[at : at + piece])
        parser.finish()
    else:
        parse(text, name, tools)
    return time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument(
        "--seconds", type=float, default=20, help="of searching, a format; 0 for the known texts alone"
    )
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--formats", nargs="*", default=list(FORMATS))
    options.add_argument("--verbose", action="store_true", help="show each text that was measured")
    chosen = options.parse_args()
    print(f"load {os.getloadavg()[0]:.2f}; ten million additions take {min(_additions() for _ in range(3)):.2f} s")
    print(f"{'format':<14}{'texts':>7}{'whole s':>9}{'by 16 s':>9}  worst text: begin, unit, end, tools given")
    for name in chosen.formats:
        search = Search(name, chosen.seed)
        candidates = [*WORST.get(name, ()), *(search.run(chosen.seconds) if chosen.seconds else ())]
        rows = []
        for text in dict.fromkeys(candidates):
            whole = text.of(1_000_000)
            rows.append((min(cost(name, whole, text.typed) for _ in range(chosen.rounds)), text))
            if chosen.verbose:
                print(f"    {rows[-1][0]:.2f} {tuple(text)!r}", flush=True)
        seconds, worst = max(rows)
        pieces = min(cost(name, worst.of(1_000_000), worst.typed, 16) for _ in range(min(chosen.rounds, 3)))
        print(f"{name:<14}{len(search.found):>7}{seconds:>9.2f}{pieces:>9.2f}  {tuple(worst)!r}", flush=True)


def _additions() -> float:
    start, total = time.process_time(), 0
    for i in range(10_000_000):
        total += i
    return time.process_time() - start


if __name__ == "__main__":
    main()
