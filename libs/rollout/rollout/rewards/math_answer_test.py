"""Answers in mathematics: the same number is the same answer, however it is written; hostile ones end in time."""

import asyncio
import builtins
import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollout.chat.messages import Reply
from rollout.environments.environment import Score
from rollout.environments.task import score_of
from rollout.errors import EpisodeFailed
from rollout.rewards import math_answer as module
from rollout.rewards.math_answer import MAX_CHARACTERS, MathChecker, math_answer
from rollout.rewards.math_worker import equal


@pytest.fixture(scope="module")
def checker() -> Iterator[MathChecker]:
    made = MathChecker(processes=1, timeout=20)
    yield made
    made.close()


def reply(text: str) -> Reply:
    return Reply(text=text, content=text)


@pytest.mark.parametrize(
    ("answer", "said", "reward"),
    [
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),  # A7
        ("18", r"\boxed{18\text{ dollars}}", 1.0),  # A7
        (r"\frac{1}{2}", r"so it is \boxed{0.5}.", 1.0),
        (r"\frac12", r"\boxed{\dfrac{1}{2}}", 1.0),
        ("18", r"\boxed{\$18}", 1.0),
        ("18", r"\boxed{18.00}", 1.0),
        ("1000", r"\boxed{1,000}", 1.0),
        ("30", r"\boxed{30^\circ}", 1.0),
        ("5", r"\boxed{x = 5}", 1.0),
        (r"\sqrt{8}", r"\boxed{2\sqrt{2}}", 1.0),
        ("(1, 2)", r"\boxed{(1,2)}", 1.0),
        (r"x^2 + 2x + 1", r"\boxed{(x+1)^2}", 1.0),
        ("18", r"\boxed{19\text{ dollars}}", 0.0),
        ("0.5", r"\boxed{\frac{1}{3}}", 0.0),
        ("18", "18", 0.0),  # not marked
        ("18", r"\boxed{}", 0.0),
        ("18", r"\boxed{18} or \boxed{20}", 0.0),  # the last mark counts
        ("Paris", r"\boxed{ Paris }", 1.0),
        ("18", r"\boxed{\frac{}{}}\(", 0.0),
        ("18", r"\boxed{" + "{" * 200 + "}" * 200 + "}", 0.0),
        ("18", r"\boxed{__import__('os').system('true')}", 0.0),
    ],
)
def test_the_same_number_is_the_same_answer(checker: MathChecker, answer: str, said: str, reward: float) -> None:
    assert math_answer(answer, checker)(reply(said), ()) == reward


@settings(max_examples=30, deadline=None)
@given(
    st.integers(-50, 50), st.sampled_from([1, 2, 4, 5, 8, 10]), st.sampled_from(["", r"\text{ cm}", r"\text{ dollars}"])
)
def test_a_fraction_is_its_decimal_with_or_without_a_unit(
    checker: MathChecker, numerator: int, denominator: int, unit: str
) -> None:
    fraction = rf"\boxed{{\frac{{{numerator}}}{{{denominator}}}{unit}}}"
    assert math_answer(repr(numerator / denominator), checker)(reply(fraction), ()) == 1.0
    assert math_answer(repr(numerator / denominator + 1), checker)(reply(fraction), ()) == 0.0


@pytest.mark.parametrize(
    "hostile", ["9^{9^{9^{9}}}", "10^{10^{10}}", r"\sum_{i=1}^{10^{9}} i^{i}", "2^{2^{2^{2^{2^{2}}}}}!!"]
)
def test_a_hostile_answer_ends_in_time_and_harms_nobody(hostile: str) -> None:
    """It is unequal, the process that it broke is replaced, and the next answer is right again."""
    made = MathChecker(processes=1, timeout=2)
    assert not made.equal("18", hostile)
    assert made.equal("0.5", r"\frac{1}{2}")
    made.close()


CODE = "__import__('os').getpid()"
PIECES = [
    CODE,
    *"10.,ex_{}%()';=&!^Ei[]: $|~*-+/@",
    "lambda:0",
    "os.system",
    "0x1",
    "1j",
    "1e1",
    '"',
    "\u0661",
    "\u00b2",
]
PIECES += [
    rf"\{name}" for name in ("frac", "text{", "mathrm{", "operatorname{", "times", "pi", "log", "sqrt", "left", "in")
]
PIECES += [
    r"\lim_{",
    r"\to",
    r"\begin{matrix}",
    r"\end{matrix}",
    r"\{",
    r"\}",
    r"\%",
    r"\$",
    r"\\",
    r"^\circ",
    r"\infty",
]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.sampled_from(PIECES), min_size=1, max_size=9).map("".join))
@example(CODE)
@example(rf"\text{{{CODE}}}")
@example(rf"x_{{{CODE}}}")
@example(rf"1.5e{CODE}")
@example("18.00")
def test_of_what_a_model_wrote_digits_alone_are_evaluated(text: str) -> None:
    """sympy makes numbers by `eval`: what reaches it is a number, or a name of its own."""
    equal("1", "1e1")  # what is loaded at the first use evaluates names of its own
    evaluated = []

    def listen(source: Any, *arguments: Any) -> Any:
        evaluated.append(source)
        return real(source, *arguments)

    real = builtins.eval
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(builtins, "eval", listen)
        equal("1", text)
    assert [
        s for s in evaluated if not re.fullmatch(r"(Integer|Float) \('?[0-9.]+' ?\)|Integer \([0-9]+ \)|E ", s)
    ] == []


def test_a_runaway_ends_although_nobody_listens_any_more() -> None:
    """The kernel ends it: here the listener never looks, and is gone."""
    process = module._Process(0.5)
    stdin = process._process.stdin
    assert stdin is not None
    stdin.write(b'{"answer": "1", "found": "9^{9^{9^{9}}}"}\n')
    stdin.close()
    assert process._process.wait(60) == 0
    process.close()


def test_hostile_answers_at_once_are_all_zero_and_their_siblings_right() -> None:
    """They wait for one another longer than a reward may take, which one alone never does: none fails for that."""
    made, hostile = MathChecker(processes=2, timeout=0.5), r"\boxed{9^{9^{9^{9}}}}"
    made.equal("1/2", "0.5")  # started
    said = [*[hostile] * 12, *[rf"\boxed{{\frac{{{n}}}{{2}}}}" for n in range(1, 9)], *[hostile] * 12]
    answers = ["18"] * 12 + [repr(n / 2) for n in range(1, 9)] + ["18"] * 12

    async def score_all() -> list[Score | BaseException]:
        jobs = [
            score_of(math_answer(answer, made), reply(text), (), timeout=5)
            for answer, text in zip(answers, said, strict=True)
        ]
        return await asyncio.gather(*jobs, return_exceptions=True)

    found = asyncio.run(score_all())
    made.close()
    assert found == [Score(0.0)] * 12 + [Score(1.0)] * 8 + [Score(0.0)] * 12


def test_a_wait_without_end_fails_the_episode_to_be_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAIT", 0.01)
    made = MathChecker(processes=1)
    made._free.acquire()
    with pytest.raises(EpisodeFailed, match="came free") as failed:
        made.equal("1", "2")
    assert failed.value.retryable


def test_long_answers_are_not_read(checker: MathChecker) -> None:
    assert not checker.equal("1", "1" + "+0" * MAX_CHARACTERS)
    assert checker.equal("1" * 3000, "1" * 3000)  # the same text is the same answer


def test_many_threads_share_few_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    original = module._Process.__init__

    def counted(self: module._Process, seconds: float) -> None:
        started.append(1)
        original(self, seconds)

    monkeypatch.setattr(module._Process, "__init__", counted)
    made, verdicts = MathChecker(processes=2, timeout=60), {}

    def work(n: int) -> None:
        verdicts[n] = made.equal(str(n / 2), rf"\frac{{{n}}}{{2}}")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 12, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(verdicts.values())
    assert 1 <= len(started) <= 2
    made.close()


def test_a_process_that_cannot_start_fails_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false" if Path("/bin/false").exists() else os.devnull)
    with pytest.raises(EpisodeFailed, match="did not start") as failed:
        MathChecker(processes=1).equal("1", "2")
    assert failed.value.retryable


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="processes must be at least 1"):
        MathChecker(processes=0)
    with pytest.raises(ValueError, match="timeout must be more than 0"):
        MathChecker(timeout=0)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'tessera-rollout\[math\]'"):
        MathChecker()


def test_classes_of_answers_depend_on_no_order(checker: MathChecker) -> None:
    written = [
        [r"\frac12", "0.5", r"\dfrac{1}{2}", "1/2"],
        ["x = 5", "5"],
        ["Paris"],
        ["7"],
        [r"2\sqrt 2", r"\sqrt{8}"],
    ]
    answers = [answer for group in written for answer in group] + ["7", "0.5"]
    wanted = [number for number, group in enumerate(written) for _ in group] + [3, 0]
    for order in (range(len(answers)), reversed(range(len(answers))), [5, 0, 9, 3, 8, 1, 6, 2, 7, 4, 11, 10]):
        places = [*order]
        found = checker.classes([answers[place] for place in places])
        assert [found.index(number) for number in found] == [
            next(at for at, other in enumerate(places) if wanted[other] == wanted[place]) for place in places
        ]
    assert checker.classes([]) == []


def test_an_answer_that_takes_for_ever_is_alone() -> None:
    quick = MathChecker(processes=1, timeout=1)
    try:
        found = quick.classes(["0.5", "9^{9^{9^9}}", r"\frac12", "x" * (MAX_CHARACTERS + 1)])
    finally:
        quick.close()
    assert found[0] == found[2]
    assert len(set(found)) == 3
