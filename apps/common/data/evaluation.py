"""Statistics of an evaluation with several answers to a prompt: mean@k, pass@k and maj@k, each with an interval.

Intervals hold 95 % of a bootstrap over prompts (percentiles of `RESAMPLES` means, seeded): the answers to one prompt
depend on one another, prompts do not.
"""

from collections.abc import Callable, Hashable, Sequence
from math import comb
from statistics import fmean

import numpy as np

from apps.common.data.answers import final_answer, same_answer
from rollout import Episode

Classes = Callable[[Sequence[str]], list[int]]
"""Function of different answers to a prompt: the number of each one's class, alike for those that are the same."""
RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
"""Percentiles of an interval's ends."""


def pass_at_k(answers: int, right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of `k` answers is right (arXiv 2107.03374, equation 1).

    That is the share of all sets of `k` of these answers that hold a right one.
    """
    return 1 - comb(answers - right, k) / comb(answers, k)


def maj_at_k(answers: Sequence[Hashable], rewards: Sequence[float]) -> float:
    """Return the mean reward of the answer that was given most often; of several such answers, the mean over them.

    Answers that are None mark nothing and have no vote; without any vote it is 0.
    """
    votes: dict[Hashable, list[float]] = {}
    for answer, reward in zip(answers, rewards, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(reward)
    most = max(map(len, votes.values()), default=0)
    return fmean([fmean(given) for given in votes.values() if len(given) == most] or [0.0])


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of the mean of one value a prompt."""
    draws = np.random.default_rng(0).multinomial(len(values), [1 / len(values)] * len(values), RESAMPLES)
    low, high = np.percentile(draws @ np.asarray(values) / len(values), INTERVAL)
    return float(low), float(high)


def marked_answer(episode: Episode) -> str | None:
    """Return the final answer that an episode's last message marks (`final_answer`); None where it marks none."""
    content = episode.messages[-1].get("content") if episode.messages else None
    return final_answer(content) if isinstance(content, str) else None


def equal_numbers(answers: Sequence[str]) -> list[int]:
    """Return the number of each answer's class: equal texts and equal numbers (`same_answer`) are one."""
    first: list[str] = []
    numbers: list[int] = []
    for answer in answers:
        known = next((place for place, other in enumerate(first) if same_answer(answer, other)), len(first))
        if known == len(first):
            first.append(answer)
        numbers.append(known)
    return numbers


def merged(answers: Sequence[str | None], classes: Classes = equal_numbers) -> list[str | None]:
    """Return answers with those of a class written as the first of it."""
    different = sorted({answer for answer in answers if answer is not None})
    class_of = dict(zip(different, classes(different), strict=True))
    first: dict[int, str] = {}
    return [None if answer is None else first.setdefault(class_of[answer], answer) for answer in answers]


def evaluation_metrics(episodes: Sequence[Episode], k: int, reward: object = None) -> dict[str, float]:
    """Return `eval/mean@k`; where every reward is 0 or 1 also `eval/pass@1`, `@2`, `@4`, ... up to k, and `eval/maj@k`
    where answers are marked. Each has `/low` and `/high`, the ends of its interval.

    Failed episodes do not count; a prompt with fewer than k scored answers counts in what needs no more than it has.
    `reward`: what scored them; its attribute `answer_classes`, if any, says which answers are one vote (`Classes`).
    """
    classes: Classes = getattr(reward, "answer_classes", equal_numbers)
    groups: dict[int, list[Episode]] = {}
    for episode in episodes:
        if episode.score is not None:
            groups.setdefault(episode.group, []).append(episode)
    rewards = {place: [episode.reward for episode in group] for place, group in groups.items()}
    answers = {place: merged([*map(marked_answer, group)], classes) for place, group in groups.items()}
    values: dict[str, list[float]] = {f"mean@{k}": [fmean(of_prompt) for of_prompt in rewards.values()]}
    if all(reward in (0, 1) for of_prompt in rewards.values() for reward in of_prompt):
        for size in sorted({2**power for power in range(k.bit_length())} | {k}):
            enough = [of_prompt for of_prompt in rewards.values() if len(of_prompt) >= size]
            values[f"pass@{size}"] = [pass_at_k(len(of_prompt), int(sum(of_prompt)), size) for of_prompt in enough]
        if any(answer is not None for of_prompt in answers.values() for answer in of_prompt):
            values[f"maj@{k}"] = [maj_at_k(answers[place], rewards[place]) for place in groups]
    return {
        f"eval/{name}{end}": value
        for name, of_prompt in values.items()
        if of_prompt
        for end, value in zip(("", "/low", "/high"), (fmean(of_prompt), *interval(of_prompt)), strict=True)
    }
