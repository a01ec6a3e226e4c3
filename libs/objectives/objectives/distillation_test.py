"""Distillation against divergences of the whole vocabulary in float64, values and gradients; what others got wrong.

The failures are those of public trackers: a sum over the teacher's tokens alone (verl #7856), one number a place given
to the sampled token (miles #2362), and a sampled k1 as a loss (ms-swift #10079).
"""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from objectives import Distillation, Totals
from objectives.choices import DIVERGENCES, Divergence
from objectives.divergence import divergence, events
from seqpack import make_batch, pack_sequences
from seqpack.batches.packed import PackedBatch

VOCAB = 7


def tables(places: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits of a policy and log-probs of a teacher, f64[places, VOCAB]."""
    draw = torch.Generator().manual_seed(seed)
    policy, teacher = (2 * torch.randn(places, VOCAB, generator=draw, dtype=torch.float64) for _ in range(2))
    return policy.requires_grad_(), torch.log_softmax(teacher, -1)


def whole(kind: Divergence, policy: Tensor, teacher: Tensor, weight: float = 0.5) -> Tensor:
    """The divergence of whole distributions, by torch's own."""
    p, q = (torch.distributions.Categorical(logits=x) for x in (teacher, policy))
    if kind == "forward":
        return torch.distributions.kl_divergence(p, q)
    if kind == "reverse":
        return torch.distributions.kl_divergence(q, p)
    middle = torch.distributions.Categorical(probs=weight * p.probs + (1 - weight) * q.probs)
    return weight * torch.distributions.kl_divergence(p, middle) + (1 - weight) * torch.distributions.kl_divergence(
        q, middle
    )


def of_tokens(table: Tensor, tokens: Tensor) -> Tensor:
    """The events of these tokens of a table of log-probs."""
    others = table.masked_fill(torch.zeros_like(table).scatter(1, tokens, 1).bool(), -torch.inf)
    return events(table.gather(1, tokens).T, others.logsumexp(1), tokens.T)


def found(kind: Divergence, policy: Tensor, teacher: Tensor, k: int, weight: float = 0.5) -> Tensor:
    tokens = teacher.topk(k).indices
    log_probs = torch.log_softmax(policy, -1)
    return divergence(of_tokens(log_probs, tokens), of_tokens(teacher, tokens), kind, weight)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("k", [VOCAB - 1, VOCAB])
@pytest.mark.parametrize("weight", [0.5, 0.1])
def test_with_one_token_left_it_is_that_of_the_whole_vocabulary(kind: Divergence, k: int, weight: float) -> None:
    policy, teacher = tables()
    got, want = found(kind, policy, teacher, k, weight), whole(kind, policy, teacher, weight)
    torch.testing.assert_close(got, want, atol=1e-13, rtol=1e-13)
    slopes = [torch.autograd.grad(x.sum(), policy, retain_graph=True)[0] for x in (got, want)]
    torch.testing.assert_close(*slopes, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_fewer_tokens_give_less_and_never_below_zero(kind: Divergence) -> None:
    for seed in range(20):
        policy, teacher = tables(seed=seed)
        values = torch.stack([found(kind, policy, teacher, k) for k in range(VOCAB)])
        assert (values >= -1e-15).all()
        assert (values.diff(dim=0) >= -1e-12).all()
        same = found(kind, teacher.clone().requires_grad_(), teacher, 3)
        assert same.abs().max() < 1e-14


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_teacher_is_reached_from_its_likeliest_tokens(kind: Divergence) -> None:
    """What teaches nothing elsewhere: the K tokens' probabilities become the teacher's, and so does what is left."""
    policy, teacher = tables()
    optimizer = torch.optim.Adam([policy], lr=0.3)
    for _ in range(250):
        optimizer.zero_grad()
        found(kind, policy, teacher, 2).sum().backward()
        optimizer.step()
    tokens = teacher.topk(2).indices
    got, want = (of_tokens(x, tokens).exp() for x in (torch.log_softmax(policy, -1), teacher))
    torch.testing.assert_close(got, want, atol=2e-2, rtol=0)


def test_without_the_rest_there_is_no_divergence() -> None:
    """Of the K tokens alone: below 0, and least where the policy has nothing on them (reverse) or all (forward)."""
    teacher = torch.tensor([[0.5, 0.3, 0.2]]).double().log()
    policy = torch.tensor([[0.6, 0.35, 0.05]]).double().log()
    alone = (teacher.exp() * (teacher - policy))[:, :2].sum()
    assert alone < 0
    assert found("forward", policy, teacher, 2) > 0
    low = torch.tensor([[1e-4, 1e-4, 0.9998]]).double().log()
    reverse = (low.exp() * (low - teacher))[:, :2].sum()
    assert abs(float(reverse)) < 2e-3
    assert found("reverse", low, teacher, 2) > 1


def expected(policy: Tensor, loss_of_token: Tensor) -> Tensor:
    """The gradient of a loss of the sampled token, in expectation over all tokens."""
    probabilities = torch.softmax(policy, -1).detach()
    return torch.autograd.grad((probabilities * loss_of_token).sum(), policy, retain_graph=True)[0]


def test_a_sampled_k1_teaches_nothing_and_one_number_a_place_nothing_of_the_teacher() -> None:
    policy, teacher = tables()
    log_probs = torch.log_softmax(policy, -1)
    (right,) = torch.autograd.grad(whole("reverse", policy, teacher).sum(), policy, retain_graph=True)
    (ours,) = torch.autograd.grad(found("reverse", policy, teacher, VOCAB - 1).sum(), policy, retain_graph=True)
    assert expected(policy, log_probs - teacher).abs().max() < 1e-15
    place = found("reverse", policy, teacher, VOCAB - 1).detach()[:, None]
    assert expected(policy, place * log_probs).abs().max() < 1e-14
    assert right.abs().max() > 0.1
    torch.testing.assert_close(ours, right)


def packed(k: int = 3, none: int = 0) -> tuple[PackedBatch, Totals, Tensor, Tensor]:
    """Two rows whose places have tables, packed; the last `none` tokens of each place are -1."""
    policy, teacher = tables(places=9)
    rows = []
    tokens = teacher.topk(k).indices
    tokens[:, k - none :] = -1
    for start, end, mask in ((0, 4, [0, 0, 1, 1]), (4, 9, [0, 1, 0, 1, 1])):
        places = slice(start, end)
        others = teacher.masked_fill(
            torch.zeros_like(teacher).scatter(1, tokens[:, : k - none], 1).bool(), -torch.inf
        ).logsumexp(1)
        rows.append(
            {
                "input_ids": torch.arange(end - start),
                "loss_mask": torch.tensor(mask).bool(),
                "teacher_tokens": tokens[places].T,
                "teacher_log_probs": teacher.gather(1, tokens.clamp(min=0))[places].T,
                "teacher_rest": others[places],
            }
        )
    batch = make_batch(rows)
    return pack_sequences(batch), Totals.of(batch), policy, teacher


def scored(batch: PackedBatch, policy: Tensor) -> PackedBatch:
    """With what an engine gives of the policy's table."""
    log_probs, tokens = torch.log_softmax(policy, -1), batch.values["teacher_tokens"].T
    none = tokens < 0
    taken = torch.zeros_like(log_probs).scatter_add(1, tokens.clamp(min=0), (~none).double()) > 0
    batch.values["several_log_probs"] = log_probs.gather(1, tokens.clamp(min=0)).masked_fill(none, 0).T
    batch.values["several_rest"] = log_probs.masked_fill(taken, -torch.inf).logsumexp(1)
    return batch


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize(("aggregation", "divisor"), [("token", 5), ("sequence", None), ("constant", 2 * 8)])
def test_the_objective_is_the_mean_over_trained_tokens(kind: Divergence, aggregation: Any, divisor: int | None) -> None:
    batch, totals, policy, teacher = packed(VOCAB - 1)
    objective = Distillation(kind, aggregation=aggregation, max_tokens=8 if aggregation == "constant" else None)
    loss, metrics = objective(torch.zeros(9), None, scored(batch, policy), totals)
    every = whole(kind, policy, teacher)
    trained = [2, 3, 5, 7, 8]
    weights = [1 / divisor] * 5 if divisor else [1 / 4] * 2 + [1 / 6] * 3
    want = sum((every[t] * w for t, w in zip(trained, weights, strict=True)), torch.zeros(()))
    torch.testing.assert_close(loss, want, check_dtype=False)
    slopes = [torch.autograd.grad(x, policy, retain_graph=True)[0] for x in (loss, want)]
    torch.testing.assert_close(*slopes)
    total, count = metrics["distill/divergence"].tolist()
    assert total / count == pytest.approx(every[trained].mean().item())
    assert metrics["distill/teacher_mass"][1] == 5


def test_what_is_not_trained_may_hold_anything_and_tokens_that_are_none_count_nothing() -> None:
    batch, totals, policy, _ = packed(3)
    clean, _ = Distillation("jsd")(torch.zeros(9), None, scored(batch, policy), totals)
    for key in ("teacher_log_probs", "teacher_rest", "several_log_probs", "several_rest"):
        batch.values[key] = batch.values[key].clone().index_fill(-1, torch.tensor([0, 1, 4, 6]), math.nan)
    dirty, metrics = Distillation("jsd")(torch.zeros(9), None, batch, totals)
    assert dirty.item() == clean.item()
    assert all(value.isfinite().all() for value in metrics.values())
    few, more = (
        Distillation("reverse")(torch.zeros(9), None, scored(one, policy), totals)[0]
        for one in (packed(3)[0], packed(5, none=2)[0])
    )
    torch.testing.assert_close(few, more)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "unknown divergence 'kl': use one of forward, reverse, jsd"),
        ({"jsd_weight": 0.3}, "jsd_weight=0.3 has no effect: it is of divergence 'jsd'"),
        ({"divergence": "jsd", "jsd_weight": 1}, "jsd_weight must be a number from 1e-06 to 0.999999"),
        ({"max_tokens": 3}, "max_tokens=3 has no effect"),
        ({"aggregation": "constant"}, "aggregation 'constant' needs max_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Distillation(**options)
