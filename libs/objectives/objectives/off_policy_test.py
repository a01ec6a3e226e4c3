"""Importance weights by hand, and what they are for: an unbiased gradient from another sampler's tokens."""

import math

import pytest
import torch

from objectives import off_policy

TRAINER = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5], dtype=torch.float64)
ROLLOUT = torch.tensor([5.0, -2.0, -1.5, 9.0, -0.5 - math.log(3.0)], dtype=torch.float64)
MASK = torch.tensor([False, True, True, False, True])
CU = torch.tensor([0, 3, 5], dtype=torch.int32)


def test_token_weights():
    got = off_policy.truncated_weights(TRAINER, ROLLOUT, cap=2.0)[MASK]
    torch.testing.assert_close(got, torch.tensor([2.0, math.exp(-0.5), 2.0], dtype=torch.float64))
    got = off_policy.masked_weights(TRAINER, ROLLOUT, cap=2.5)[MASK]
    torch.testing.assert_close(got, torch.tensor([0.0, math.exp(-0.5), 0.0], dtype=torch.float64))
    assert float(off_policy.masked_weights(torch.tensor([-1.0]), torch.tensor([0.0]), cap=2.0)) == 0.0


def test_sequence_weights_are_the_product_of_trained_tokens():
    got = off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, cap=10.0)
    first, second = math.exp(1.0 - 0.5), 3.0
    torch.testing.assert_close(got, torch.tensor([first] * 3 + [second] * 2, dtype=torch.float64))
    cut = off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, cap=2.0)
    torch.testing.assert_close(cut, torch.tensor([first] * 3 + [2.0] * 2, dtype=torch.float64))
    gone = off_policy.sequence_weights(TRAINER, ROLLOUT, MASK, CU, cap=2.0, mask=True)
    torch.testing.assert_close(gone, torch.tensor([first] * 3 + [0.0] * 2, dtype=torch.float64))


def test_weights_make_the_gradient_right():
    """Summed over the sampler's distribution, weighted samples give the trainer's policy gradient."""
    logits = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64, requires_grad=True)
    sampler = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    advantage = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    new = torch.log_softmax(logits, -1)
    weight = off_policy.truncated_weights(new, sampler.log(), cap=100.0)
    (got,) = torch.autograd.grad((sampler * weight * advantage * new).sum(), logits)
    (want,) = torch.autograd.grad((torch.softmax(logits, -1) * advantage).sum(), logits)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_weights_carry_no_gradient():
    for name in off_policy.CORRECTIONS:
        trainer = TRAINER.clone().requires_grad_()
        assert not off_policy.weights(name, trainer, ROLLOUT, MASK, CU, cap=2.0).requires_grad


def test_mismatch_counts_trained_tokens_alone():
    got = off_policy.mismatch(TRAINER, ROLLOUT, MASK)
    gaps = [1.0, -0.5, math.log(3.0)]
    assert got["mismatch/abs"].tolist() == pytest.approx([sum(map(abs, gaps)), 3.0])
    assert float(got["mismatch/abs/max"]) == pytest.approx(math.log(3.0))
    assert got["mismatch/kl"].tolist() == pytest.approx([sum(math.exp(g) - 1 - g for g in gaps), 3.0])
    assert off_policy.mismatch(TRAINER[:0], ROLLOUT[:0], MASK[:0])["mismatch/abs"].tolist() == [0.0, 0.0]


def test_refusals():
    with pytest.raises(ValueError, match="at least 1"):
        off_policy.truncated_weights(TRAINER, ROLLOUT, cap=0.5)
    with pytest.raises(ValueError, match="unknown off-policy correction"):
        off_policy.weights("clip", TRAINER, ROLLOUT, MASK, CU)
