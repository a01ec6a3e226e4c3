"""A calculator for models: arithmetic by a small parser of our own. No text of the model is executed."""

import re
from fractions import Fraction

from rollout.tools.tool import Tool
from rollout.tools.workers import instant

MAX_LENGTH = 200  # characters of an expression
MAX_DEPTH = 50  # nested parentheses, signs and powers
MAX_EXPONENT = 64
MAX_DIGITS = 200  # of a result's numerator or denominator

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%^()]))", re.ASCII)
_SPELLINGS = str.maketrans(
    {"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "\u00b7": "*"}
)  # times, divided by, minus, dot


def evaluate(expression: str) -> Fraction:
    """Return the exact value of an expression with + - * / // % ** (or ^) and parentheses, as in Python.

    Raises ValueError, with the reason in words, for anything else: unknown characters, a missing operand, division by
    zero, a power that is not a whole number or too large, an expression or a result too long.
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_LENGTH} are allowed")
    parser = _Parser(_tokens(expression.translate(_SPELLINGS)))
    value = parser.sum(0)
    if parser.at < len(parser.tokens):
        raise ValueError(f"did not expect {parser.tokens[parser.at]!r} there")
    return value


def show(value: Fraction) -> str:
    """Write a number for people: whole numbers as such, others with up to 10 significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def calculator(name: str = "calculator") -> Tool:
    """Return a tool `name(expression: string)` that returns the value of the expression."""

    @instant  # its work is bounded: MAX_LENGTH, MAX_DEPTH, MAX_EXPONENT, MAX_DIGITS
    def run(expression: str) -> str:
        return show(evaluate(expression))

    return Tool(
        name=name,
        description="Evaluates an arithmetic expression.",
        parameters={
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "For example (3+4)*5"}},
            "required": ["expression"],
        },
        run=run,
    )


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if not match:
            raise ValueError(f"cannot read {text[at:].strip()[:1]!r} as arithmetic")
        tokens.append(match.group(1) or match.group(2))
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent, one method a level of precedence; `depth` bounds the recursion."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens
        self.at = 0

    def _take(self, *wanted: str) -> str | None:
        if self.at < len(self.tokens) and self.tokens[self.at] in wanted:
            self.at += 1
            return self.tokens[self.at - 1]
        return None

    def sum(self, depth: int) -> Fraction:
        """Parse product (("+" | "-") product)*."""
        value = self._product(depth)
        while operator := self._take("+", "-"):
            right = self._product(depth)
            value = _bounded(value + right if operator == "+" else value - right)
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._signed(depth)
        while operator := self._take("*", "/", "//", "%"):
            right = self._signed(depth)
            if operator != "*" and right == 0:
                raise ValueError("division by zero")
            if operator == "*":
                value *= right
            elif operator == "/":
                value /= right
            elif operator == "//":
                value = Fraction(value // right)
            else:
                value %= right
            value = _bounded(value)
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ValueError(f"the expression is nested more than {MAX_DEPTH} deep")
        if sign := self._take("+", "-"):
            value = self._signed(depth + 1)
            return -value if sign == "-" else value
        return self._power(depth)

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        if not self._take("**", "^"):
            return base
        exponent = self._signed(depth + 1)
        if exponent.denominator != 1 or abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"the exponent {show(exponent)} is not a whole number within {MAX_EXPONENT}")
        if base == 0 and exponent < 0:
            raise ValueError("division by zero")
        return _bounded(Fraction(base ** int(exponent)))

    def _atom(self, depth: int) -> Fraction:
        if self._take("("):
            value = self.sum(depth + 1)
            if not self._take(")"):
                raise ValueError("a closing parenthesis is missing")
            return value
        if self.at < len(self.tokens) and (self.tokens[self.at][0].isdigit() or self.tokens[self.at][0] == "."):
            self.at += 1
            return Fraction(self.tokens[self.at - 1])
        token = repr(self.tokens[self.at]) if self.at < len(self.tokens) else "the end"
        raise ValueError(f"expected a number but found {token}")


def _bounded(value: Fraction) -> Fraction:
    limit = 10**MAX_DIGITS
    if abs(value.numerator) >= limit or value.denominator >= limit:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value
