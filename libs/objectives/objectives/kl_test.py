"""KL estimators: formulas, exact expectations over a small vocabulary, and their gradients."""

import math

import pytest
import torch
from torch import Tensor

from objectives import kl

POLICY = torch.tensor([0.5, 0.2, 0.2, 0.1], dtype=torch.float64)
REFERENCE = torch.tensor([0.25, 0.25, 0.4, 0.1], dtype=torch.float64)


def exact(p: Tensor, q: Tensor) -> float:
    return sum(float(a) * math.log(float(a) / float(b)) for a, b in zip(p, q, strict=True))


def test_formulas() -> None:
    new, ref = torch.tensor([-1.0, -3.0], dtype=torch.float64), torch.tensor([-2.0, -0.5], dtype=torch.float64)
    for x, y, k1, k2, k3 in zip(new, ref, kl.k1(new, ref), kl.k2(new, ref), kl.k3(new, ref), strict=True):
        log_r = float(y - x)
        assert float(k1) == pytest.approx(-log_r, abs=1e-12)
        assert float(k2) == pytest.approx(log_r**2 / 2, abs=1e-12)
        assert float(k3) == pytest.approx(math.exp(log_r) - 1 - log_r, abs=1e-12)


def test_expectations_over_the_policy() -> None:
    """k1 and k3 are unbiased; k3 is never negative."""
    new, ref = POLICY.log(), REFERENCE.log()
    want = exact(POLICY, REFERENCE)
    for name in ("k1", "k3", "k1+", "k3+"):
        assert float((POLICY * kl.estimate(new, ref, name)).sum()) == pytest.approx(want, abs=1e-12)
    assert kl.k3(new, ref).ge(0).all()
    assert not kl.k1(new, ref).ge(0).all()


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "k1+", "k3+"])
def test_expected_gradients(name: kl.Estimator) -> None:
    """The gradient that a loss on policy samples gets, summed exactly over the vocabulary."""
    logits = POLICY.log().clone().requires_grad_()
    new = torch.log_softmax(logits, -1)
    (got,) = torch.autograd.grad((POLICY * kl.estimate(new, REFERENCE.log(), name)).sum(), logits)
    policy = torch.softmax(logits, -1)
    if name == "k1":
        want = torch.zeros_like(POLICY)
    elif name != "k3":
        (want,) = torch.autograd.grad((policy * (policy.log() - REFERENCE.log())).sum(), logits)
    else:
        (want,) = torch.autograd.grad((REFERENCE * (REFERENCE.log() - policy.log())).sum(), logits)
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)


def test_the_default_is_k3() -> None:
    torch.testing.assert_close(kl.estimate(POLICY, REFERENCE), kl.k3(POLICY, REFERENCE), atol=0, rtol=0)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"^unknown KL estimator 'k4': use one of k1, k2, k3, k1\+, k3\+$"):
        kl.estimate(POLICY, POLICY, "k4")  # type: ignore[arg-type]
