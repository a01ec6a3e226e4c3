"""Sums with a marked answer: made on the fly, checked exactly, held-out problems apart from the trained ones by a hash.

The stream of problems has no end: `digits` sets how many different ones there are. Whether a problem is held out
depends on the problem alone, so no seed, shard or restart can mix the two sides.
"""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass

HELD_OUT_PARTS = 16  # one problem in so many is held out


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its one right answer."""

    question: str
    answer: str

    @property
    def expression(self) -> str:
        """The input of a calculator: the question without its equals sign."""
        return self.question.removesuffix("=")

    @property
    def solution(self) -> str:
        """The reply in a demonstration."""
        return f"\\boxed{{{self.answer}}}"


def addition(a: int, b: int) -> Problem:
    """Return the problem a + b."""
    return Problem(f"{a}+{b}=", str(a + b))


def is_held_out(problem: Problem) -> bool:
    """Return whether a problem is only ever asked in evaluations."""
    digest = hashlib.blake2b(problem.question.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_PARTS == 0


def problems(rng: random.Random, digits: int, held_out: bool = False) -> Iterator[Problem]:
    """Yield an endless stream of sums of two numbers of `digits` digits each, all held out or none.

    Raises:
        ValueError: digits is below 1.
    """
    if digits < 1:
        raise ValueError(f"digits must be at least 1, got {digits}")
    low, high = 10 ** (digits - 1), 10**digits - 1
    while True:
        problem = addition(rng.randint(low, high), rng.randint(low, high))
        if is_held_out(problem) == held_out:
            yield problem


def distinct(stream: Iterator[Problem], count: int, tries: int = 1000) -> list[Problem]:
    """Return the next `count` different problems of a stream.

    Raises:
        ValueError: the stream seems to hold fewer.
    """
    different: dict[str, Problem] = {}
    misses = 0
    while len(different) < count:
        problem = next(stream)
        misses = misses + 1 if problem.question in different else 0
        if misses > tries:
            raise ValueError(f"asked for {count} different problems, found {len(different)}: raise digits")
        different[problem.question] = problem
    return list(different.values())
