"""mean@k, pass@k and maj@k against all subsets and a simulation, and an evaluation of a model on files."""

import itertools
import json
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest

from apps.common.data.evaluation import evaluation_metrics, interval, maj_at_k, merged, pass_at_k
from apps.grpo.commands.evaluate import main
from apps.grpo.commands.evaluate_model import evaluate_model
from apps.grpo.main import configure
from apps.grpo.recipes.math import reward as math_reward
from apps.quickstart.model import save_tiny_model
from rollout import Episode, Score
from rollout.chat.messages import Message


@pytest.mark.parametrize("answers", [1, 4, 7])
def test_pass_at_k_is_the_share_of_all_sets_with_a_right_answer(answers: int) -> None:
    for right, k in itertools.product(range(answers + 1), range(1, answers + 1)):
        sets = list(itertools.combinations([True] * right + [False] * (answers - right), k))
        assert pass_at_k(answers, right, k) == pytest.approx(fmean(map(any, sets)), abs=1e-12)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        ("aab", (1, 1, 0), 1.0),
        ("abb", (1, 0, 0), 0.0),
        ("ab", (1, 0), 0.5),
        ("abcc", (1, 0, 0, 0), 0.0),
        ((None, None, "a"), (0, 0, 1), 1.0),
        ((None, None), (0, 0), 0.0),
    ],
)
def test_the_majority_votes_without_those_that_mark_nothing(answers: Any, rewards: Any, expected: float) -> None:
    assert maj_at_k(list(answers), rewards) == expected


def test_equal_numbers_are_one_answer() -> None:
    assert merged(["1,200", "x", "1200.0", None, "$1200", "x"]) == ["1,200", "x", "1,200", None, "1,200", "x"]


def test_answers_that_the_scorer_holds_equal_are_one_vote() -> None:
    """Two right answers, each written in its way, outvote a wrong one that was given twice."""
    episodes = answered(0, *[(f"\\boxed{{{text}}}", 1.0) for text in (r"\frac12", "0.5", r"\dfrac{1}{2}")])
    episodes += answered(0, *[("\\boxed{2}", 0.0)] * 2)
    assert evaluation_metrics(episodes, 5)["eval/maj@5"] == 0.0
    assert evaluation_metrics(episodes, 5, math_reward)["eval/maj@5"] == 1.0
    assert math_reward.answer_classes([r"\frac12", "1,200", "0.5", "1200"]) == [0, 1, 0, 1]


def test_an_interval_holds_the_mean_as_often_as_it_says() -> None:
    """Of 120 samples of 40 prompts; the standard error of that share is 2 %."""
    draw = np.random.default_rng(1)
    values = draw.beta(0.6, 0.4, size=(120, 40))
    held = [low <= 0.6 <= high for low, high in map(interval, values)]
    assert 0.89 < fmean(held) < 0.995
    assert interval([1.0] * 5) == (1.0, 1.0)


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def answered(place: int, *answers: tuple[str, float | None]) -> list[Episode]:
    return [
        Episode("e", "t", 1, (), None, "failed", error="broken", group=place)
        if reward is None
        else Episode("e", "t", 1, (), Score(reward), "done", messages=(said(text),), group=place)
        for text, reward in answers
    ]


def test_what_is_told_of_an_evaluation() -> None:
    right, wrong, none = ("so \\boxed{4}", 1.0), ("#### 5", 0.0), ("?", 0.0)
    episodes = answered(0, right, wrong, right, wrong) + answered(1, wrong, none, none, ("", None))
    found = evaluation_metrics(episodes, 4)
    names = ["mean@4", "pass@1", "pass@2", "pass@4", "maj@4"]
    assert list(found) == [f"eval/{name}{end}" for name in names for end in ("", "/low", "/high")]
    expected = {"mean@4": 0.25, "pass@1": 0.25, "pass@2": (5 / 6 + 0) / 2, "pass@4": 1.0, "maj@4": 0.25}
    assert {name: found[f"eval/{name}"] for name in names} == pytest.approx(expected)
    scores = evaluation_metrics(answered(0, ("a", 0.5), ("b", 2.0)), 2)
    assert list(scores) == ["eval/mean@2", "eval/mean@2/low", "eval/mean@2/high"]


def rows_of(path: Path, *numbers: int) -> Path:
    rows = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in numbers]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def reward(reply: Any, reference: str) -> float:
    return float(len(reply.text) % 2)


def test_a_model_is_evaluated_on_all_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, model = rows_of(tmp_path / "a.jsonl", *range(6)), save_tiny_model(tmp_path / "model", 0)
    words = ["--model", str(model), "--data", str(data), "--preset", "gsm8k", "--sampling.max-new-tokens", "8"]
    words += ["--reward", f"{__file__}:reward", "--max-episode-tokens", "200", "--max-prompt-tokens", "150"]
    main([*words, "--num-generations-eval", "2", "--out", str(tmp_path / "out")])
    told = capsys.readouterr().out
    assert "6 prompts, 12 answers, 0 failed" in told
    facts = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    answers = [json.loads(line) for line in (tmp_path / "out" / "answers.jsonl").read_text().splitlines()]
    assert [row["task"] for row in answers] == [f"row-{n}" for n in range(1, 7) for _ in "ab"]
    assert facts["metrics"]["eval/mean@2"] == pytest.approx(fmean(row["reward"] for row in answers))
    assert f"{'mean@2':24} {facts['metrics']['eval/mean@2']:.4f}  95 % [" in told
    others = rows_of(tmp_path / "b.jsonl", *range(3, 12))
    found = evaluate_model(configure([*words, "--eval-data", str(others), "--eval-prompts", "7"]))
    assert (len(found.evaluation.episodes), "eval/mean@1" in found.metrics) == (7, True)
