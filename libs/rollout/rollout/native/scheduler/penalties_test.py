"""Min-p and penalties: transformers' own processors on random logits in float64, and frequencies of whole completions.

Frequency and presence penalties, which transformers lacks, are held to OpenAI's formula, written out token by token.
"""

import math
from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from rollout.engine import Sampling
from rollout.native.engine import NativeEngine
from rollout.native.scheduler.penalties import apply_penalties
from rollout.native.scheduler.request import SequenceRequest
from rollout.native.scheduler.sampling import SamplingRows, choose, sampled_log_probs
from rollout.testing.model import tiny_model

VOCAB = 40


def request(sampling: Sampling, prompt: tuple[int, ...], ids: list[int]) -> SequenceRequest:
    return SequenceRequest(prompt, sampling, 0, lambda done: None, ids=ids)


def drawn(rng: torch.Generator, count: int) -> list[int]:
    return torch.randint(VOCAB, (count,), generator=rng).tolist()


def log_probs(logits: Tensor, rows: list[SequenceRequest]) -> Tensor:
    columns = SamplingRows.build([row.sampling for row in rows], logits.device)
    return sampled_log_probs(apply_penalties(logits, rows), columns)


@pytest.mark.parametrize("seed", range(5))
def test_min_p_is_that_of_transformers(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(3, VOCAB, dtype=torch.float64, generator=rng)
    settings = [Sampling(min_p=p, temperature=t) for p, t in ((0.1, 1.0), (0.5, 1.7), (0.0, 0.6))]
    found = log_probs(logits, [request(s, (1,), []) for s in settings])
    for row, s in enumerate(settings):
        heated = logits[row : row + 1] / torch.tensor(s.temperature)  # the column's float32
        kept = MinPLogitsWarper(s.min_p)(torch.empty(1, 0), heated) if s.min_p else heated
        assert torch.equal(kept.isneginf(), found[row : row + 1].isneginf())
        assert torch.allclose(kept.log_softmax(-1), found[row : row + 1], atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_the_repetition_penalty_is_that_of_transformers(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(3, VOCAB, dtype=torch.float64, generator=rng)
    rows = [
        request(Sampling(repetition_penalty=p), tuple(drawn(rng, 7)), drawn(rng, n))
        for p, n in ((1.3, 9), (0.7, 0), (1.0, 5))
    ]
    found = apply_penalties(logits, rows)
    for at, row in enumerate(rows):
        seen = torch.tensor([[*row.prompt, *row.ids]])
        expected = RepetitionPenaltyLogitsProcessor(row.sampling.repetition_penalty)(seen, logits[at : at + 1].clone())
        assert torch.equal(expected[0], found[at])


def by_hand(logits: list[float], row: SequenceRequest) -> list[float]:
    """The logits by their definition, one token at a time."""
    s, counts = row.sampling, Counter(row.ids)
    out = []
    for token, x in enumerate(logits):
        if token in counts or token in row.prompt:
            x = x / s.repetition_penalty if x > 0 else x * s.repetition_penalty
        out.append(x - s.frequency_penalty * counts[token] - s.presence_penalty * (counts[token] > 0))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_all_penalties_together_are_their_definitions(seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(4, VOCAB, dtype=torch.float64, generator=rng)
    settings = (
        Sampling(presence_penalty=0.7),
        Sampling(frequency_penalty=-0.4),
        Sampling(),
        Sampling(presence_penalty=-1.5, frequency_penalty=0.9, repetition_penalty=1.4),
    )
    rows = [request(s, tuple(drawn(rng, 5)), drawn(rng, 60)) for s in settings]
    before = logits.clone()
    found = apply_penalties(logits, rows)
    assert torch.equal(logits, before)  # the prefill cache keeps them for others
    for at, row in enumerate(rows):
        expected = torch.tensor(by_hand(before[at].tolist(), row), dtype=torch.float64)
        assert torch.allclose(found[at], expected, atol=1e-12, rtol=0)


def test_rows_without_a_request_and_without_penalties_are_left_alone() -> None:
    logits = torch.randn(2, VOCAB)
    assert apply_penalties(logits, [None, request(Sampling(top_k=3), (1,), [2])]) is logits


def test_greedy_completions_with_a_repetition_penalty_are_those_of_generate() -> None:
    model = tiny_model(48)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.5)
    prompt = [5, 9, 9, 30, 7]
    sampling = Sampling(greedy=True, repetition_penalty=1.5, max_new_tokens=40)
    beside = Sampling(temperature=0.8, max_new_tokens=40, seed=1)
    engine = NativeEngine(model)
    done, plain = engine.generate_batch([prompt] * 2, [sampling, beside])
    alone = engine.generate_batch([prompt], beside)[0]
    assert plain.ids == alone.ids  # the prefill that both read is not penalised
    expected = model.generate(
        torch.tensor([prompt]), do_sample=False, repetition_penalty=1.5, max_new_tokens=40, eos_token_id=None
    )
    assert [*prompt, *done.ids] == expected[0].tolist()
    assert [*done.ids] != [*engine.generate_batch([prompt], Sampling(greedy=True, max_new_tokens=40))[0].ids]


SETTINGS = [
    Sampling(min_p=0.1, max_new_tokens=3),
    Sampling(presence_penalty=1.5, max_new_tokens=3),
    Sampling(
        temperature=1.4, top_k=3, top_p=0.9, min_p=0.05, repetition_penalty=1.8, frequency_penalty=0.8, max_new_tokens=3
    ),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_frequencies_of_whole_completions(sampling: Sampling) -> None:
    """All completions of three tokens of a vocabulary of five: drawn as often as their probabilities say."""
    rng = torch.Generator().manual_seed(0)
    table, prompt, count = torch.randn(5, 5, dtype=torch.float64, generator=rng), (0, 3), 20_000

    def next_probs(ids: tuple[int, ...]) -> list[float]:
        x = [
            y / sampling.temperature
            for y in by_hand(table[(*prompt, *ids)[-1]].tolist(), request(sampling, prompt, [*ids]))
        ]
        weights = [math.exp(y) for y in x]
        weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
        order = sorted(range(5), key=lambda i: -weights[i])[: sampling.top_k or None]
        total, reached, kept = sum(weights[i] for i in order), 0.0, list[int]()
        for i in order:
            if reached < sampling.top_p * total:
                kept.append(i)
            reached += weights[i]
        total = sum(weights[i] for i in kept)
        return [weights[i] / total if i in kept else 0.0 for i in range(5)]

    expected = {}
    for ids in product(range(5), repeat=3):
        probability = math.prod(next_probs(ids[:n])[ids[n]] for n in range(3))
        if probability > 0:
            expected[ids] = probability
    rows = [SequenceRequest(prompt, sampling, seed, lambda done: None) for seed in range(count)]
    columns = SamplingRows.build([sampling] * count, torch.device("cpu"))
    for _ in range(3):
        logits = table[torch.tensor([(*prompt, *row.ids)[-1] for row in rows])]
        uniforms = torch.tensor([[next(row.uniforms)] for row in rows], dtype=torch.float64)
        tokens, found = choose(apply_penalties(logits, rows), columns, uniforms)
        for row, token, log_prob in zip(rows, tokens.tolist(), found.tolist(), strict=True):
            row.take(token, log_prob, 0)
    counts = Counter(tuple(row.ids) for row in rows)
    assert counts.keys() <= expected.keys()
    chi_square = sum((counts[ids] - count * p) ** 2 / (count * p) for ids, p in expected.items())
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)
    for row in rows[:200]:
        told = math.exp(sum(row.log_probs))
        assert told == pytest.approx(expected[tuple(row.ids)], rel=1e-6)
