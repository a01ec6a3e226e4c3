"""Rewards for programs: what passes, what a program may not talk itself into, what fails the episode."""

import math
from collections.abc import Iterator
from typing import Any, Never

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.messages import Reply
from rollout.environments.environment import Score
from rollout.errors import EpisodeFailed
from rollout.rewards.code_answer import (
    OutputTest,
    ValueTest,
    _same,
    code_answer,
    last_program,
    read_asserts,
)
from rollout.tools.sandbox.run import encoded
from rollout.tools.sandbox.sandbox import Limits, Sandbox, SandboxDiedError

SQUARES = (
    ValueTest("square(3)", 9),
    ValueTest("square(-2)", 4),
    ValueTest("square(0.5)", 0.25),
    ValueTest("square(0)", 0),
)
RIGHT = "def square(x):\n    return x * x"


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Limits(wall_seconds=10, cpu_seconds=1))
    yield made
    made.close()


def reply(code: str) -> Reply:
    text = f"Here it is:\n```python\n{code}\n```\nDone."
    return Reply(text=text, content=text)


@pytest.mark.parametrize(
    ("code", "share"),
    [
        (RIGHT, 1.0),
        ("import sys\nprint('noise', file=sys.stderr)\nprint('noise')\n" + RIGHT, 1.0),
        ("def square(x):\n    return abs(x) * 2", 0.5),  # -2 and 0
        ("def square(x):\n    return x * x if x > 0 else 1 / 0", 0.5),
        ("def square(x):\n    while x < 0: pass\n    return x * x", 0.75),  # one test hangs, the others count
        ("def square(x):\n    return x * x + 1e-9", 1.0),  # floats, nearly
        ("def square(x): return", 0.0),
        ("square = 3", 0.0),
        ("1 +", 0.0),
        ("", 0.0),
    ],
)
def test_the_share_of_tests_that_pass(sandbox: Sandbox, code: str, share: float) -> None:
    assert code_answer(SQUARES, sandbox)(reply(code), ()) == Score(float(share == 1.0), {"tests_passed": share})
    assert code_answer(SQUARES, sandbox, partial=True)(reply(code), ()) == Score(share, {"tests_passed": share})


HACKS = {
    "ending early": """
import os
os._exit(0)""",
    "ending early, politely": """
import sys
sys.exit(0)""",
    "claiming to equal": """
class A:
    __eq__ = lambda s, o: True
    __hash__ = lambda s: 0
def square(x): return A()""",
    "looking like what is compared": """
def square(x): return {'float': '9'}""",
    "an int of its own": """
class A(int):
    __eq__ = lambda s, o: True
    __hash__ = int.__hash__
def square(x): return A(1)""",
    "printing what passes": """
print('9')
print('OK, 4 passed')
def square(x): return None""",
    "writing to every descriptor": """
import os
for i in range(3, 64):
    try: os.write(i, b'null')
    except OSError: pass
os._exit(0)""",
    "changing the encoder": """
import json
json.dumps = lambda *a, **k: 'true'
def square(x): return 1""",
    "changing builtins": """
import builtins
builtins.isinstance = lambda *a: True
builtins.len = lambda x: 1
def square(x): return 'x'""",
    "looking for what is expected": """
import gc
found = [o for o in gc.get_objects() if isinstance(o, dict) and 'expected' in o]
def square(x): return found[0]['expected'] if found else None""",
    "right, but never at its end": """
import threading
def spin():
    while True: pass
threading.Thread(target=spin).start()
def square(x): return x * x""",
    "at the end": """
import atexit, os
atexit.register(os._exit, 0)
def square(x): raise ValueError""",
}


@pytest.mark.parametrize("name", HACKS)
def test_a_program_cannot_talk_itself_into_passing(sandbox: Sandbox, name: str) -> None:
    score = code_answer(SQUARES, sandbox)(reply(HACKS[name]), ())
    assert score.reward_components["tests_passed"] == 0.0


@pytest.mark.parametrize(
    ("code", "reward"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", 1.0),
        ("import sys\nfor line in sys.stdin: print(sum(map(int, line.split())), '  ')\nprint()", 1.0),
        ("import sys\nprint(3, file=sys.stderr)", 0.0),
        ("print(4)", 0.0),
        ("print(3)\nraise SystemExit(1)", 0.0),  # the right words, and then a failure
        ("print(3)\nprint(3)", 0.0),
        ("3", 1.0),  # a notebook's last line, as the sandbox shows it
    ],
)
def test_programs_that_read_and_print(sandbox: Sandbox, code: str, reward: float) -> None:
    assert code_answer([OutputTest("1 2\n", "3\n")], sandbox)(reply(code), ()).reward == reward


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```\n```py\nb\n```", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```bash\nls\n```", "a\n"),
        ("  ```python title\n  a\n  ```", "  a\n"),
        ("```python\na", None),
        ("a = 1", None),
        ("", None),
        ("```python\nx = '```'\n```", "x = '```'\n"),
    ],
)
def test_the_last_program_of_a_reply(text: str, code: str | None) -> None:
    assert last_program(text) == code


def test_a_reply_without_a_program_scores_nothing(sandbox: Sandbox) -> None:
    answer = Reply(text="```python\nx\n```", content="I can't.")  # a program in thought is no answer
    assert code_answer(SQUARES, sandbox)(answer, ()) == Score(0.0, {"tests_passed": 0.0})


def test_asserts_are_read_as_tests() -> None:
    source = "assert f(1, [2]) == {'a': (1, 2)}\nassert g('x') == -3.5, 'message'"
    assert read_asserts(source) == (ValueTest("f(1, [2])", {"a": (1, 2)}), ValueTest("g('x')", -3.5))
    for other in (
        "f(1) == 2",
        "x = f(1)",
        "assert all(f(i) for i in x)",
        "assert isinstance(f(1), int)",
        "assert [i for i in x]",
    ):
        with pytest.raises(ValueError, match="not so"):
            read_asserts(other)


IMPORTS = "\nimport math\nfrom math import isclose\n"
ROOTS = """
assert root(4)
assert not root(0)
assert 1 < root(2) < 1.5
assert root(2) == 1.4142135623730951 and root(2) != 2
assert math.isclose(root(2), 1.41421, rel_tol=1e-4)
assert isclose(root(math.pi), 1.7724538509055159)
assert abs(root(2) - 1.41421) < 1e-4
assert root(9) == pytest.approx(3)
assert root(9) in [3, 4] and root(9) not in (4,)
assert root(4) == root(16) - 2
assert len(roots([4, 9])) == 2 and set(roots([4, 9])) == {2, 3} and roots([4])[0] == 2
assert roots([]) is not None and roots(None) is None
"""


def test_plain_asserts_floats_and_imports_are_decided_outside_the_sandbox(sandbox: Sandbox) -> None:
    tests = read_asserts(IMPORTS + ROOTS)
    right = "def root(x): return x ** 0.5\ndef roots(x): return None if x is None else [root(v) for v in x]"
    namespace: dict[str, Any] = {"pytest": pytest}
    exec(right + IMPORTS + ROOTS, namespace)  # Python itself says that they hold
    assert code_answer(tests, sandbox)(reply(right), ()).reward == 1.0
    off = right.replace("0.5", "0.51")  # and which of them do not
    failing = 0
    for line in ROOTS.split("\n")[1:-1]:
        try:
            exec(off + IMPORTS + line, {"pytest": pytest})
        except AssertionError:
            failing += 1
    share = code_answer(tests, sandbox, partial=True)(reply(off), ()).reward
    assert share == (len(tests) - failing) / len(tests)
    for hack in (
        "import sys, math\nmath.isclose = lambda *a, **k: True\ndef root(x): return 7",
        "class A(float):\n  __lt__ = __gt__ = __le__ = __sub__ = __eq__ = lambda s, o: True\ndef root(x): return A(9)",
        "import builtins\nbuiltins.abs = builtins.len = lambda x: 0\ndef root(x): return 9",
    ):
        hacked = code_answer(tests[2:7], sandbox, partial=True)(reply(hack), ())
        assert hacked.reward == 0.0, hack


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=2), v, max_size=2) | st.tuples(v),
    max_leaves=5,
)


@given(VALUES, VALUES)
def test_equality_is_pythons_but_for_floats_truth_values_and_tuples(one: Any, other: Any) -> None:
    def plain(value: Any) -> Any:
        """Tuples as lists, truth values as texts that equal no number."""
        if isinstance(value, bool):
            return repr(value)
        if isinstance(value, list | tuple):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return "nan" if isinstance(value, float) and math.isnan(value) else value

    assert _same(encoded(one), encoded(one))
    if plain(one) == plain(other):
        assert _same(encoded(one), encoded(other))
    elif _same(encoded(one), encoded(other)):  # nearly equal floats alone
        assert "float" in repr(encoded(one)) or "float" in repr(encoded(other))


class Dying(Sandbox):
    """One whose server is always lost."""

    def run_all(self, programs: object) -> Never:
        raise SandboxDiedError("it is gone")


def test_a_lost_sandbox_fails_the_episode() -> None:
    with pytest.raises(EpisodeFailed, match="it is gone") as failed:
        code_answer(SQUARES, Dying())(reply(RIGHT), ())
    assert failed.value.retryable


def test_tests_that_cannot_work_are_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ValueError, match="at least one test"):
        code_answer([], sandbox)
    with pytest.raises(ValueError, match="no literal"):
        ValueTest("f()", [object()])
    with pytest.raises(SyntaxError):
        ValueTest("f(", 1)
