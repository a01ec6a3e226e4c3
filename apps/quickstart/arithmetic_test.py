import itertools
import random

import pytest

from apps.quickstart.arithmetic import addition, distinct, is_held_out, problems


def test_held_out_and_trained_problems_never_meet() -> None:
    trained = {p.question for p in itertools.islice(problems(random.Random(0), 2), 20_000)}
    held_out = {p.question for p in itertools.islice(problems(random.Random(1), 2, held_out=True), 5_000)}
    assert trained
    assert held_out
    assert not trained & held_out


def test_the_share_held_out_is_one_in_sixteen() -> None:
    pairs = [addition(a, b) for a in range(100) for b in range(100)]
    assert 0.05 < sum(map(is_held_out, pairs)) / len(pairs) < 0.075


def test_the_same_seed_gives_the_same_problems() -> None:
    first, second = (list(itertools.islice(problems(random.Random(3), 2), 50)) for _ in range(2))
    assert first == second


def test_distinct_never_repeats_and_refuses_what_it_cannot_find() -> None:
    drawn = distinct(problems(random.Random(0), 2, held_out=True), 300)
    assert len({p.question for p in drawn}) == 300
    with pytest.raises(ValueError, match="digits"):
        distinct(problems(random.Random(0), 1, held_out=True), 101)


def test_answers_are_right() -> None:
    for problem in itertools.islice(problems(random.Random(0), 29), 100):
        a, b = problem.expression.split("+")
        assert int(problem.answer) == int(a) + int(b)
        assert problem.solution == f"\\boxed{{{int(a) + int(b)}}}"


def test_numbers_have_the_digits_asked_for() -> None:
    for problem in itertools.islice(problems(random.Random(0), 3), 100):
        assert all(len(operand) == 3 for operand in problem.expression.split("+"))
    with pytest.raises(ValueError, match="at least 1"):
        next(problems(random.Random(0), 0))
