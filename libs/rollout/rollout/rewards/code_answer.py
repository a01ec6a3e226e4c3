"""Rewards for programs: tests run against the program of the completion, in the kernel's sandbox.

Each test is a run of its own, so that a program that hangs or ends itself in one is still tested by the others. What a
test expects never enters the sandbox: a program can't read it, and can't claim that it has passed. It returns a value
or prints a text, which is compared outside, as data: an object that claims to equal everything equals nothing.
"""

import ast
import contextlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.chat.messages import Reply
from rollout.environments.environment import Score
from rollout.errors import EpisodeFailed
from rollout.rewards.asserts import FORM, holds, sandboxed_parts
from rollout.tools.sandbox.run import encoded
from rollout.tools.sandbox.sandbox import Limits, Program, Ran, Sandbox, SandboxDiedError
from rollout.tools.tool import ToolResult

_FENCED = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)
_PYTHON = ("python", "python3", "py", "")
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # tolerance of floats


@dataclass(frozen=True)
class ValueTest:
    """A test that an expression (such as `f(2)`) has this value after the program: a literal, tuples being lists."""

    expression: str
    expected: Any

    def __post_init__(self) -> None:
        ast.parse(self.expression, mode="eval")  # SyntaxError says where
        if _has_object(encoded(self.expected)):
            raise ValueError(f"the test of {self.expression} expects {self.expected!r}, which is no literal")


@dataclass(frozen=True)
class OutputTest:
    """A test that the program prints this text for this input; blanks at line ends and at the end don't count."""

    stdin: str
    expected: str


@dataclass(frozen=True)
class AssertTest:
    """A test that an expression is true after the program and the lines of `setup`: see `rewards.asserts`."""

    expression: str
    setup: str = ""
    parts: tuple[str, ...] = field(init=False, repr=False, compare=False)  # that the program computes

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(sandboxed_parts(self.tree)))

    @property
    def tree(self) -> ast.expr:
        """The expression, parsed."""
        return ast.parse(self.expression, mode="eval").body


Test = ValueTest | OutputTest | AssertTest


def read_asserts(source: str) -> tuple[ValueTest | AssertTest, ...]:
    """Read lines of asserts, as in MBPP and HumanEval, and the imports before them. Raise ValueError for others."""
    tests: list[ValueTest | AssertTest] = []
    imports: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.append(ast.unparse(node))
        elif not isinstance(node, ast.Assert):
            raise ValueError(f"{FORM}; not so: {ast.unparse(node)}")
        else:
            test = AssertTest(ast.unparse(node.test), "\n".join(imports))
            tests.append(test if imports else _value_test(node.test) or test)
    return tuple(tests)


def _value_test(test: ast.expr) -> ValueTest | None:
    """Return `EXPRESSION == LITERAL` as a test of a value."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        with contextlib.suppress(ValueError):
            expected = ast.literal_eval(test.comparators[0])
            if sandboxed_parts(test.left) == [ast.unparse(test.left)]:
                return ValueTest(ast.unparse(test.left), expected)
    return None


def last_program(text: str) -> str | None:
    """Return the last fenced block of Python in a text (```python, or without a language); None without one."""
    blocks = [code for language, code in _FENCED.findall(text) if language.lower() in _PYTHON]
    return blocks[-1] if blocks else None


def code_answer(tests: Sequence[Test], sandbox: Sandbox | None = None, partial: bool = False) -> "CodeAnswer":
    """Return a reward of 1.0 where the reply's last program passes all tests, else 0.0; with `partial`, the share.

    The score's component `tests_passed` is that share. Raises SandboxRefusedError, now, where the kernel refuses a
    sandbox, and ValueError where there are no tests.
    """
    if not tests:
        raise ValueError("a code reward needs at least one test: without, every program would pass")
    box = sandbox or Sandbox(Limits(wall_seconds=30.0, cpu_seconds=10))
    box.start()
    return CodeAnswer(tuple(tests), box, partial)


@dataclass(frozen=True)
class CodeAnswer:
    """The reward function of `code_answer`."""

    tests: tuple[Test, ...]
    sandbox: Sandbox
    partial: bool

    def __call__(self, reply: Reply, results: Sequence[ToolResult]) -> Score:
        """Score a reply; blocking. Raise EpisodeFailed (to be tried again) where the sandbox is lost."""
        del results
        code = last_program(reply.content)
        passed = 0 if code is None else sum(self._passes(code))
        share = passed / len(self.tests)
        return Score(share if self.partial else float(share == 1.0), {"tests_passed": share})

    def _passes(self, code: str) -> list[bool]:
        programs = [_program(test, code) for test in self.tests]
        try:
            return [_passed(test, ran) for test, ran in zip(self.tests, self.sandbox.run_all(programs), strict=True)]
        except SandboxDiedError as error:
            raise EpisodeFailed(f"the sandbox of the code reward: {error}", retryable=True) from error


def _program(test: Test, code: str) -> Program:
    if isinstance(test, OutputTest):
        return Program(code, stdin=test.stdin, errors=False)
    if isinstance(test, ValueTest):
        return Program(code, expressions=(test.expression,), errors=False)
    return Program(f"{code}\n{test.setup}", expressions=test.parts, errors=False)


def _passed(test: Test, ran: Ran) -> bool:
    if isinstance(test, OutputTest):
        return ran.ok and _lines(ran.output) == _lines(test.expected)
    if isinstance(test, AssertTest):
        whole = ran.ok and len(ran.results) == len(test.parts)
        return whole and holds(test.tree, list(ran.results), lambda a, b: _same(encoded(a), encoded(b)))
    return ran.ok and len(ran.results) == 1 and _same(ran.results[0], encoded(test.expected))


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _same(one: Any, other: Any) -> bool:
    """Return whether two encoded values are equal; numbers nearly. Booleans are no numbers; objects equal nothing."""
    a, b = _number(one), _number(other)
    if a is not None and b is not None:
        if isinstance(one, int) and isinstance(other, int):
            return one == other
        return math.isclose(a, b, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE) or (math.isnan(a) and math.isnan(b))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return type(one) is type(other) and one == other


def _number(value: Any) -> float | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value) if abs(value) < 1 << 1000 else None
    if isinstance(value, dict) and value.keys() == {"float"}:
        try:
            return float(value["float"])
        except (TypeError, ValueError):
            return None
    return None


def _has_object(value: Any) -> bool:
    if isinstance(value, dict):
        return "object" in value or any(map(_has_object, value.values()))
    return isinstance(value, list) and any(map(_has_object, value))
