"""Per-token estimators of KL(policy || reference) from samples of the policy.

From John Schulman's note "Approximating KL Divergence" (2020), with x drawn from the policy and log r = log_probs of
the reference minus the policy's, bounded (`objectives.ratio`). All take f[T] and return it in float32 at least.

As a term of the loss they differ in their gradients too. With samples of the current policy, the expected gradient of
k1 is zero (do not use it in a loss: `GRPO` refuses it), that of k2 is the gradient of KL(policy || reference), and that
of k3 the gradient of KL(reference || policy). As values, k1 and k3 are unbiased, and k3 has the smaller variance and is
never negative. "k1+" and "k3+" have the value of k1 or k3 and the gradient of k2: both unbiased for KL(policy ||
reference).
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from objectives.checks import check_choice
from objectives.choices import Estimator as Estimator
from objectives.ratio import log_ratio, ratio_excess


def k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return -log r: unbiased, high variance, can be negative."""
    return -log_ratio(ref_log_probs, log_probs)


def k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return (log r)^2 / 2: biased as a value, low variance, right gradient."""
    return 0.5 * log_ratio(ref_log_probs, log_probs).square()


def k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return r - 1 - log r: unbiased as a value, never negative; that of GRPO's paper (arXiv 2402.03300, eq. 4)."""
    return ratio_excess(ref_log_probs, log_probs)


def unbiased(value: Callable[[Tensor, Tensor], Tensor], log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Return the value of an estimator with the gradient of k2, the expected one of KL(policy || reference)."""
    gradient = k2(log_probs, ref_log_probs)
    return value(log_probs, ref_log_probs).detach() + (gradient - gradient.detach())


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "k1+": partial(unbiased, k1),
    "k3+": partial(unbiased, k3),
}


def estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: Estimator = "k3") -> Tensor:
    """Return the estimate by the estimator's name: f32[T], f32[T] -> f32[T]. ValueError for an unknown one."""
    check_choice("KL estimator", estimator, ESTIMATORS)
    return ESTIMATORS[estimator](log_probs, ref_log_probs)
