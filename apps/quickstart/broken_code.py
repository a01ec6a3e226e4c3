"""Functions with a bug, and the environment in which one is repaired until its tests pass.

A problem's tests are run in the sandbox against the function of each reply; the one that fails is shown to the model.
"""

import hashlib
import operator
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rollout.chat.messages import Message, Reply
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.errors import EpisodeFailed
from rollout.rewards.code_answer import last_program
from rollout.tools.sandbox.sandbox import Limits, Sandbox, SandboxDiedError

HELD_OUT_PARTS = 16  # one problem in so many is held out
ATTEMPTS = 2
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
}  # fmt: skip
CONSTANTS = ARGUMENTS = range(2, 10)
LIMITS = Limits(wall_seconds=10.0, cpu_seconds=2)


@dataclass(frozen=True, slots=True)
class CodeProblem:
    """A function of x with a bug, the arguments of its tests, and the right function."""

    broken: str
    right: str
    arguments: tuple[int, ...]
    """The last one's test is hidden: a function that lists the others' answers is wrong."""

    @property
    def question(self) -> str:
        """The broken function and the tests that are shown."""
        return program(self.broken) + "".join(f"\nassert f({x}) == {value(self.right, x)}" for x in self.arguments[:-1])


def program(expression: str) -> str:
    """Return a reply: the function that returns an expression."""
    return f"```python\ndef f(x):\n    return {expression}\n```"


def value(expression: str, x: int) -> int:
    """Return the value of `x OPERATOR CONSTANT`."""
    return OPERATORS[expression[1:-1]](x, int(expression[-1]))


def shown_failure(problem: CodeProblem, expression: str, arguments: Iterable[int] | None = None) -> str | None:
    """Return what the model is told of a function; None where all tests pass, or those of the arguments."""
    for x in problem.arguments if arguments is None else arguments:
        if value(expression, x) != (wanted := value(problem.right, x)):
            return f"f({x}) is {value(expression, x)}, not {wanted}"
    return None


def code_problems(rng: random.Random, held_out: bool = False) -> Iterator[CodeProblem]:
    """Yield an endless stream of problems, all held out or none.

    The operator is wrong, and no other than the right one passes the tests that are shown.
    """
    names = tuple(OPERATORS)
    while True:
        right, broken = rng.sample(names, 2)
        constant, arguments = rng.choice(CONSTANTS), tuple(rng.sample(ARGUMENTS, 3))
        problem = CodeProblem(f"x{broken}{constant}", f"x{right}{constant}", arguments)
        passing = [name for name in names if shown_failure(problem, f"x{name}{constant}", arguments[:-1]) is None]
        if passing == [right] and is_held_out(problem) == held_out:
            yield problem


def is_held_out(problem: CodeProblem) -> bool:
    """Return whether a problem is only ever asked in evaluations."""
    digest = hashlib.blake2b(problem.question.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_PARTS == 0


def as_data(problem: CodeProblem) -> dict[str, Any]:
    """Return the problem as the data of its task."""
    return asdict(problem)


@cache
def sandbox() -> Sandbox:
    """Return the sandbox of this process."""
    return Sandbox(LIMITS)


class FixCode:
    """Environment of one problem: up to `ATTEMPTS` replies, each with a whole function; 1 for one that passes."""

    def __init__(self) -> None:
        self._turns, self._passed = 0, False

    async def open(self, context: EpisodeContext) -> Observation:
        """Show the function and its tests."""
        self._problem = CodeProblem(**{**context.data, "arguments": tuple(context.data["arguments"])})
        return Observation(({"role": "user", "content": self._problem.question},))

    async def step(self, reply: Reply) -> StepResult:
        """Run the tests against the reply's function."""
        self._turns += 1
        failure = self._run(last_program(reply.content))
        self._passed = failure is None
        done = self._passed or self._turns == ATTEMPTS
        said: Message = {"role": "user", "content": failure or "passed"}
        return StepResult(() if done else (said,), done, {"attempts": float(self._turns)})

    async def finish(self, end: End) -> Score:
        """Return 1 for a function that passed."""
        del end
        return Score(float(self._passed))

    async def close(self) -> None:
        """Do nothing: the sandbox is the process's."""

    def _run(self, code: str | None) -> str | None:
        """Return what the model is told; None where all tests pass. What is right is compared outside the sandbox."""
        if code is None:
            return "no program"
        calls = tuple(f"f({x})" for x in self._problem.arguments)
        try:
            ran = sandbox().run(code, expressions=calls)
        except SandboxDiedError as error:
            raise EpisodeFailed(f"the sandbox: {error}", retryable=True) from error
        if not ran.ok or len(ran.results) != len(calls):
            return (ran.output.strip().splitlines() or [ran.reason or "no value"])[-1][:60]
        for x, call, result in zip(self._problem.arguments, calls, ran.results, strict=True):
            wanted = value(self._problem.right, x)
            if type(result) is not int or result != wanted:
                return f"{call} is {result if type(result) is int else 'no number'}, not {wanted}"
        return None
