"""Gradients of losses, KL terms and distillation against finite differences of their values, in float64.

Of what the papers put behind a stop-gradient (CISPO's and DPPO's weights, the value of k1+ and k3+) the value has
another slope than the gradient: there the differences are of the formula with what is stopped held where it is.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from objectives import GRPO, Distillation, Totals
from objectives.choices import POLICY_LOSSES
from objectives.preference import dpo_loss
from seqpack import PackedBatch, make_batch, pack_sequences

LENGTHS = (4, 7, 3)
STOPPED = {"cispo", "dppo_tv", "dppo_kl"}
SEQUENCES = {"gspo", "gmpo", "sapo"}


def packed(seed: int, distance: float = 0.3) -> tuple[Tensor, PackedBatch, Totals]:
    """Log-probs f64[T], and a batch whose other policies lie about `distance` away."""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for length in LENGTHS:
        mask = torch.arange(length) > 0
        advantage = torch.randn(1, generator=draw).expand(length) * mask
        rows.append({"input_ids": torch.arange(length), "loss_mask": mask, "advantages": advantage})
    batch = make_batch(rows)
    new = -2 * torch.rand(sum(LENGTHS), generator=draw, dtype=torch.float64) - 0.1
    noise = torch.randn(3, len(new), generator=draw, dtype=torch.float64) * distance
    values = {"old_log_probs": new + noise[0], "ref_log_probs": new + noise[1], "rollout_log_probs": new + noise[2]}
    values["high_covariance"] = torch.arange(len(new)) % 3 == 1
    given = pack_sequences(batch)
    given = given.with_values(**values, advantages=given.values["advantages"].double())
    return new.requires_grad_(), given, Totals.of(batch)


def objectives() -> dict[str, GRPO]:
    every = {
        name: GRPO(policy_loss=name, aggregation="sequence" if name in SEQUENCES else "token")
        for name in POLICY_LOSSES
        if name not in STOPPED
    }
    terms = {f"{name} in the loss": GRPO(kl_coef=0.3, kl_estimator=name) for name in ("k2", "k3")}
    corrections = {
        name: GRPO(off_policy=name)
        for name in ("truncate", "mask", "sequence_truncate", "sequence_mask", "geometric_truncate", "geometric_mask")
    }
    dual = {"dual clip": GRPO(clip_high=0.28, dual_clip=1.1)}
    every["gspo"] = replace(every["gspo"], clip_low=0.5, clip_high=0.5)  # its own bounds cut most sequences here
    return every | terms | corrections | dual | {"constant": GRPO(aggregation="constant", max_tokens=9)}


@pytest.mark.parametrize("name", objectives())
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_of_an_objective_is_the_slope_of_its_value(name: str, seed: int) -> None:
    objective = objectives()[name]
    new, batch, totals = packed(seed)
    assert torch.autograd.grad(objective(new, None, batch, totals)[0], new)[0].count_nonzero() > 2
    assert torch.autograd.gradcheck(lambda x: objective(x, None, batch, totals)[0], [new], eps=1e-7, atol=1e-6)


def test_a_stop_gradient_has_another_slope() -> None:
    """So that the others are left out for a reason."""
    new, batch, totals = packed(0)
    for name in STOPPED:
        loss = GRPO(policy_loss=name, clip_low=0.9, clip_high=0.9)
        same = torch.autograd.gradcheck(
            lambda x, loss=loss: loss(x, None, batch, totals)[0], [new], eps=1e-7, atol=1e-6, raise_exception=False
        )
        assert not same, name


def held(name: str, at: Tensor, batch: PackedBatch) -> Callable[[Tensor], Tensor]:
    """The loss of a token by the paper's formula, its weights those of the log-probs `at`; or k2, whose slope it is."""
    old, ref, advantage = (batch.values[key] for key in ("old_log_probs", "ref_log_probs", "advantages"))
    if name in ("k1+", "k3+"):
        return lambda new: 0.5 * (new - ref).square()
    ratio, sign = (at - old).exp(), advantage.sign()
    if name == "cispo":
        return lambda new: -ratio.clamp(0, 1.28) * advantage * new
    p, q = old.exp(), at.exp()
    moved = (q - p).abs() if name == "dppo_tv" else p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
    cut = (moved > (0.2 if name == "dppo_tv" else 0.05)) & ((q - p) * sign > 0)
    return lambda new: -(ratio * ~cut).clamp(max=20) * advantage * new


@pytest.mark.parametrize("name", sorted([*STOPPED, "k1+", "k3+"]))
@pytest.mark.parametrize("seed", range(3))
def test_with_what_is_stopped_held_it_is_the_slope(name: str, seed: int) -> None:
    """Central differences of the formula, a token at a time."""
    new, batch, totals = packed(seed)
    penalty = name not in STOPPED
    # without an advantage the policy's loss has no gradient, and what is left is the penalty's
    batch = batch.with_values(advantages=batch.values["advantages"] * (not penalty))
    objective = GRPO(kl_coef=1.0, kl_estimator=name) if penalty else GRPO(policy_loss=name)  # type: ignore[arg-type]
    (got,) = torch.autograd.grad(objective(new, None, batch, totals)[0], new)
    formula, step = held(name, new.detach(), batch), 1e-6
    above, below = (formula(new.detach() + side * step) for side in (1, -1))
    want = (above - below) / (2 * step) * batch.values["loss_mask"] / totals.tokens
    assert got.count_nonzero() > 2
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)


def test_the_entropy_bonus_and_dpo() -> None:
    new, batch, totals = packed(1)
    entropy = new.detach().abs().requires_grad_()
    bonus = GRPO(entropy_coef=0.2)
    assert torch.autograd.gradcheck(lambda x: bonus(new.detach(), x, batch, totals)[0], [entropy], eps=1e-7, atol=1e-6)
    pairs = [x.clone().requires_grad_() for x in -torch.rand(2, 5, dtype=torch.float64)]
    first, second = -torch.rand(2, 5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda one, other: dpo_loss(one, other, first, second, beta=0.7).sum(), pairs)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_distillation(kind: str) -> None:
    """Through the policy's logits, so that the K tokens and the rest stay a distribution."""
    objective = Distillation(kind)  # type: ignore[arg-type]
    new, batch, totals = packed(2)
    draw = torch.Generator().manual_seed(5)
    logits, teacher = torch.randn(2, len(new), 6, generator=draw, dtype=torch.float64)
    k = 3

    def told(table: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.log_softmax(table, -1)
        return rows[:, :k], rows[:, k:].logsumexp(-1)

    keys = dict(zip(("tokens", "log_probs", "rest"), objective.required_keys, strict=True))
    likely, rest = told(teacher)
    tokens = torch.arange(k).expand(len(new), k)
    given = batch.with_values(**{keys["tokens"]: tokens.T, keys["log_probs"]: likely.T, keys["rest"]: rest})

    def loss(table: Tensor) -> Tensor:
        mine, others = told(table)
        scored = given.with_values(several_log_probs=mine.T, several_rest=others, several_tokens=tokens.T)
        return objective(new.detach(), None, scored, totals)[0]

    (slope,) = torch.autograd.grad(loss(logits.requires_grad_()), logits)
    assert slope.abs().max() > 1e-3
    assert torch.autograd.gradcheck(loss, [logits], eps=1e-7, atol=1e-6)
