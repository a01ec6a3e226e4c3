"""What estimators and penalties come to in expectation: exact sums over every answer of a small vocabulary.

An answer has one or two tokens of three; END ends it. The policy and the reference are tables of logits, so that every
expectation, and the gradient of every objective, is a sum of seven terms in float64.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from objectives import GRPO, Totals, advantages, kl
from objectives.token_advantages import returns_with_kl
from seqpack import make_batch, pack_sequences

VOCABULARY, END = 3, 0
ANSWERS = [(END,), *[(a, b) for a in (1, 2) for b in range(VOCABULARY)]]
REWARDS = torch.tensor([0.0, 1.0, 0.0, 3.0, 1.0, 0.0, 1.0], dtype=torch.float64)
COEF = 0.3


def table(seed: int) -> Tensor:
    """Logits of the first token, and of the second after each first one: f64 (1 + VOCABULARY, VOCABULARY)."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(1 + VOCABULARY, VOCABULARY, generator=draw, dtype=torch.float64).requires_grad_()


def log_probs(logits: Tensor, answer: Sequence[int]) -> Tensor:
    """Log-prob of each token of an answer."""
    rows = torch.log_softmax(logits, -1)
    places = [0, *[1 + token for token in answer[:-1]]]
    return torch.stack([rows[place, token] for place, token in zip(places, answer, strict=True)])


def probabilities(logits: Tensor) -> Tensor:
    return torch.stack([log_probs(logits, answer).sum() for answer in ANSWERS]).exp()


def slope(value: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


def expected_slope(logits: Tensor, loss_of: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The expected gradient of a loss of one sampled answer: of its number and its tokens' log-probs."""
    weights = probabilities(logits).detach()
    losses = [loss_of(i, log_probs(logits, answer)) for i, answer in enumerate(ANSWERS)]
    return slope((weights * torch.stack(losses)).sum(), logits)


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of whole answers."""
    p, q = probabilities(logits), probabilities(reference).detach()
    return (p * (p.log() - q.log())).sum()


def local_divergences(logits: Tensor, reference: Tensor, of_policy: bool) -> Tensor:
    """KL between the two tables' next tokens, in the mean over the places that the policy comes to, whose chances are
    constants."""
    policy, given = torch.log_softmax(logits, -1), torch.log_softmax(reference.detach(), -1)
    one, other = (policy, given) if of_policy else (given, policy)
    places = (one.exp() * (one - other)).sum(-1)
    reached = torch.cat([places.new_ones(1), policy[0].exp().detach()])
    reached[1 + END] = 0
    return (reached * places).sum()


def test_k1_in_the_reward_has_the_gradient_of_the_penalised_reward() -> None:
    """Token by token: what a token does to the KL of later ones counts too (arXiv 2203.02155, equation 2)."""
    policy, reference = table(0), table(1)

    def loss_of(i: int, tokens: Tensor) -> Tensor:
        columns = torch.ones(len(tokens), dtype=torch.bool), tokens.detach(), log_probs(reference, ANSWERS[i]).detach()
        mask, new, ref = (torch.nested.nested_tensor([column], layout=torch.jagged) for column in columns)
        returns = returns_with_kl(REWARDS[i : i + 1], mask, new, ref, COEF).values()
        return -(returns * tokens).sum()

    want = slope(-(probabilities(policy) * REWARDS).sum() + COEF * divergence(policy, reference), policy)
    torch.testing.assert_close(expected_slope(policy, loss_of), want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_a_penalty_in_the_loss_has_another_gradient(name: kl.Estimator) -> None:
    """k1: none. k2 and those with its gradient: of the next token's KL alone. k3: of that in the other direction."""
    policy, reference = table(0), table(1)

    def loss_of(i: int, tokens: Tensor) -> Tensor:
        return kl.estimate(tokens, log_probs(reference, ANSWERS[i]).detach(), name).sum()

    got, whole = expected_slope(policy, loss_of), slope(divergence(policy, reference), policy)
    want = torch.zeros_like(got)
    if name != "k1":
        want = slope(local_divergences(policy, reference, of_policy=name != "k3"), policy)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    assert (got - whole).abs().max() > 0.01


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_where_the_policy_is_the_reference_only_k1_moves_it(name: kl.Estimator) -> None:
    """By samples: k1's gradient is noise around 0."""
    policy = table(0)
    for answer in ANSWERS:
        tokens = log_probs(policy, answer)
        moved = slope(kl.estimate(tokens, tokens.detach(), name).sum(), policy).abs().max()
        assert (moved > 0.1) == (name == "k1")


def groups(logits: Tensor, size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Every group of answers, with its probability."""
    chances = probabilities(logits).tolist()
    for group in itertools.product(range(len(ANSWERS)), repeat=size):
        yield group, math.prod(chances[i] for i in group)


def group_slope(logits: Tensor, name: str, objective: GRPO, size: int) -> Tensor:
    """The expected gradient of an objective, over every group, with the advantages of a name."""
    spread = {"grpo": advantages.grpo, "dr_grpo": advantages.dr_grpo, "rloo": advantages.rloo}[name]
    every = [log_probs(logits, answer) for answer in ANSWERS]
    total = torch.zeros((), dtype=torch.float64)
    for group, chance in groups(logits, size):
        scores = spread(REWARDS[list(group)], torch.zeros(size, dtype=torch.long))
        rows = []
        for i, score in zip(group, scores, strict=True):
            mask = torch.tensor([False] + [True] * len(ANSWERS[i]))
            rows.append({"input_ids": torch.tensor([9, *ANSWERS[i]]), "loss_mask": mask, "advantages": score * mask})
        batch = make_batch(rows)
        tokens = torch.cat([torch.cat([every[i].new_zeros(1), every[i]]) for i in group])
        loss, _ = objective(tokens, None, pack_sequences(batch), Totals.of(batch))
        total = total + chance * loss
    return slope(total, logits)


def alike(one: Tensor, other: Tensor) -> float:
    """The cosine between two gradients."""
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), 0))


CONSTANT = GRPO(aggregation="constant", max_tokens=1)


@pytest.mark.parametrize("size", [2, 3])
def test_leave_one_out_over_a_constant_is_the_gradient_of_the_reward(size: int) -> None:
    """RLOO (arXiv 2402.14740) exactly; Dr. GRPO (arXiv 2503.20783) up to the factor (G - 1) / G."""
    policy = table(2)
    want = -slope((probabilities(policy) * REWARDS).sum(), policy)
    got = group_slope(policy, "rloo", CONSTANT, size)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)
    scaled = group_slope(policy, "dr_grpo", CONSTANT, size) * size / (size - 1)
    torch.testing.assert_close(scaled, want, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "objective"),
    [("grpo", CONSTANT), ("rloo", GRPO(aggregation="sequence")), ("rloo", GRPO(aggregation="token"))],
    ids=["a group's deviation", "a mean over each answer", "a mean over the tokens"],
)
def test_what_divides_by_what_was_sampled_points_elsewhere(name: str, objective: GRPO) -> None:
    """The biases that Dr. GRPO names: of difficulty, and of length."""
    policy = table(2)
    want = -slope((probabilities(policy) * REWARDS).sum(), policy)
    assert 0 < alike(group_slope(policy, name, objective, 2), want) < 0.999
    assert alike(group_slope(policy, "rloo", CONSTANT, 2), want) > 1 - 1e-9
