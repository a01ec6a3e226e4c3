"""Sampling against its definitions: frequencies, filters written out by hand, log-probs that sum to one."""

import math
from typing import Any

import pytest
import torch

from rollout.engine import Sampling
from rollout.native.scheduler.request import uniforms_of
from rollout.native.scheduler.sampling import SamplingRows, choose, sampled_log_probs

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def rows_of(*settings: Sampling) -> SamplingRows:
    return SamplingRows.build(settings, torch.device("cpu"))


def uniforms(n: int) -> torch.Tensor:
    return torch.rand(n, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_hand(sampling: Sampling) -> torch.Tensor:
    """The distribution by its definition, one token at a time, in plain Python."""
    weights = [math.exp(x / sampling.temperature) for x in LOGITS.tolist()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[: sampling.top_k or None]
    total, reached, nucleus = sum(weights[i] for i in kept), 0.0, list[int]()
    for i in kept:
        nucleus.append(i)
        reached += weights[i] / total
        if reached >= sampling.top_p:
            break
    total = sum(weights[i] for i in nucleus)
    return torch.tensor([weights[i] / total if i in nucleus else 0.0 for i in range(len(weights))], dtype=torch.float64)


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.5),
    Sampling(temperature=3.0),
    Sampling(top_k=3),
    Sampling(top_k=1),
    Sampling(top_p=0.8),
    Sampling(top_p=0.01),
    Sampling(temperature=2.0, top_k=4, top_p=0.9),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_the_distribution_is_the_definitions(sampling: Sampling) -> None:
    probs = sampled_log_probs(LOGITS[None], rows_of(sampling))[0].double().exp()
    assert torch.allclose(probs, by_hand(sampling), atol=1e-6)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_frequencies_match_the_probabilities(sampling: Sampling) -> None:
    n = 50_000
    tokens, log_probs = choose(LOGITS.expand(n, -1), rows_of(*[sampling] * n), uniforms(n))
    expected = by_hand(sampling)
    counts = torch.bincount(tokens, minlength=len(LOGITS)).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    chi_square = ((counts - n * expected)[possible] ** 2 / (n * expected[possible])).sum().item()
    assert chi_square < 35  # five degrees of freedom at most: a right sampler exceeds this once in 600,000 seeds
    assert torch.allclose(log_probs.double().exp(), expected[tokens], atol=1e-6)


def test_one_batch_may_mix_all_settings() -> None:
    mixed = [*SETTINGS, Sampling(greedy=True)]
    high = torch.full((len(mixed), 1), 0.999999, dtype=torch.float64)
    tokens, log_probs = choose(LOGITS.expand(len(mixed), -1), rows_of(*mixed), high)
    for i, sampling in enumerate(mixed[:-1]):
        alone, own = choose(LOGITS[None], rows_of(sampling), high[:1])
        assert tokens[i] == alone[0]
        assert log_probs[i] == pytest.approx(own[0].item(), abs=1e-6)
    assert tokens[-1] == 0  # greedy, and scored under the model's own distribution
    assert log_probs[-1].item() == pytest.approx(math.log(by_hand(Sampling())[0].item()), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_filtered_token_is_never_chosen_at_the_edges(uniform: float) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 1.0, -torch.inf]])
    token, log_prob = choose(logits, rows_of(Sampling()), torch.tensor([[uniform]], dtype=torch.float64))
    assert token.item() in (1, 2)
    assert math.isfinite(log_prob.item())


def test_ties_keep_exactly_k() -> None:
    probs = sampled_log_probs(torch.zeros(1, 5), rows_of(Sampling(top_k=2)))[0].exp()
    assert probs.tolist() == pytest.approx([0.5, 0.5, 0, 0, 0])


def test_a_seed_is_one_stream_of_numbers() -> None:
    mine, other = uniforms_of(3), uniforms_of(4)
    drawn = [next(mine) for _ in range(200)]
    whole = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert drawn == whole.tolist()  # however it is drawn in blocks
    assert drawn[:50] != [next(other) for _ in range(50)]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"temperature": 0}, "greedy=True"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"greedy": True, "min_p": 0.1}, "greedy ignores"),
        ({"greedy": True, "temperature": 0.5}, "greedy ignores"),
        ({"greedy": True, "seed": 1}, "greedy ignores"),
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**wrong)
