"""GRPO and its variants: one clipped policy loss with the options in which the papers differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from objectives.checks import check_choice, check_number, check_weight, check_without_effect, gathered
from objectives.choices import (
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    LARGEST_CAP,
    OPTIONS,
    POLICY_LOSSES,
    Aggregation,
    Correction,
    Estimator,
    check_clips,
    check_loss_options,
    check_max_tokens,
    loss_options,
)

if TYPE_CHECKING:  # a command line makes these settings, and needs no torch for it
    from tensordict import TensorDict
    from torch import Tensor

    from seqpack.batches.packed import PackedBatch
    from seqpack.batches.view import BatchView, Totals


@dataclass(frozen=True)
class GRPO:
    """Clipped policy loss over given per-token `advantages`; optional KL penalty, entropy bonus, off-policy weights.

    The old policy is the batch's `old_log_probs` where it has them. Without them the batch is taken as on-policy: the
    old policy is the current one, the ratio is 1 and its gradient is the policy gradient. `GRPO()` is token-mean GRPO
    without a KL term; the papers:

    - DeepSeekMath: `GRPO(aggregation="sequence", kl_coef=0.04)` with the advantage "grpo"
    - Dr. GRPO: `GRPO(aggregation="constant", max_tokens=N)` with "dr_grpo"
    - DAPO: `GRPO(clip_high=0.28)` with "grpo"
    - MiniMax-M1: `GRPO(policy_loss="cispo")` with "grpo"
    - GSPO, GMPO, SAPO: `GRPO(policy_loss="gspo", aggregation="sequence")`, "gmpo" or "sapo", with "grpo"
    - decoupled PPO (AReaL, arXiv 2505.24298, section 5.2): `GRPO(off_policy="truncate")`, whose old policy is the one
      that the update starts from, not the sampler
    - IcePop: `GRPO(off_policy="mask", off_policy_cap=5, off_policy_floor=0.5)`

    Raises ValueError for an unknown choice, a number out of range, and an option that has no effect beside the others.
    """

    policy_loss: str = "ppo"
    """The loss of a token, by its name in `objectives.losses.POLICY_LOSSES`: ppo, cispo, gspo, gmpo, sapo, dppo_tv,
    dppo_kl, clip_cov, kl_cov, or one you registered; or a
    function of `objectives.losses.PolicyTokens`, as FILE.py:NAME or package.module:NAME."""
    clip_low: float | None = None
    """The ratio to the old policy is bounded by 1 - clip_low from below; None: the loss's own (ppo 0.2, cispo 1)."""
    clip_high: float | None = None
    """The ratio is bounded by 1 + clip_high from above; None: the loss's own (ppo 0.2, cispo 0.28)."""
    dual_clip: float | None = None
    """Bound -dual_clip A on the loss of a negative advantage A, for ppo; None: no bound."""
    covariance_share: float | None = None
    """Share of the tokens that clip_cov leaves out, or kl_cov holds to the old policy; None: 0.0002."""
    aggregation: Aggregation = "token"
    """The aggregation over tokens: equal weight a token, equal weight a sequence, or a sum over a constant length."""
    max_tokens: int | None = None
    """For aggregation "constant": the fixed length to divide by."""
    kl_coef: float = 0.0
    """Weight of the KL penalty against `ref_log_probs`; 0 reads no reference."""
    kl_estimator: Estimator | None = None
    """The estimator of that penalty: k2, k3, or k1+ and k3+, which have the gradient of k2; None: k3."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (arXiv 1707.06347, equation 9); 0 computes no entropy."""
    off_policy: Correction | None = None
    """Weights between the policy the update starts from and the sampler (`rollout_log_probs`); None: none."""
    off_policy_cap: float | None = None
    """The largest of those weights, at most 1e8; None: 2."""
    off_policy_floor: float | None = None
    """The smallest weight that an off_policy that masks keeps; None: 1 / off_policy_cap, and 0 for sequence_mask."""
    policy_loss_options: tuple[str, ...] = ()
    """NAME=VALUE options of a policy loss, by its signature."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Return a text for each problem, most of which begin with a field's name."""
        return gathered([*self._of_the_loss(), *self._of_the_terms()])

    def _of_the_loss(self) -> Iterator[Callable[[], object]]:
        """Yield checks of the policy loss and its aggregation."""
        yield partial(POLICY_LOSSES.check_known, self.policy_loss)
        if self.policy_loss in POLICY_LOSSES:
            options = loss_options(self.policy_loss)
            takes = ", ".join(options) or "none of these options"
            for name in OPTIONS:
                if name not in options:
                    reason = f"policy_loss {self.policy_loss!r} takes {takes}"
                    yield partial(check_without_effect, name, getattr(self, name), reason)
            yield partial(check_loss_options, self.policy_loss, self.policy_loss_options)
        if self.policy_loss not in ("clip_cov", "kl_cov"):
            other = "it goes with policy_loss clip_cov or kl_cov"
            yield partial(check_without_effect, "covariance_share", self.covariance_share, other)
        elif self.covariance_share is not None:
            yield partial(check_number, "covariance_share", self.covariance_share, 0, 1)
        for name in ("clip_low", "clip_high", "dual_clip"):
            yield partial(check_clips, **{name: getattr(self, name)})
        yield partial(check_choice, "aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation == "constant":
            yield partial(check_max_tokens, self.max_tokens)
        else:
            yield partial(check_without_effect, "max_tokens", self.max_tokens, "it goes with aggregation 'constant'")

    def _of_the_terms(self) -> Iterator[Callable[[], object]]:
        """Yield checks of KL penalty, entropy bonus and off-policy weights."""
        yield partial(check_weight, "kl_coef", self.kl_coef)
        if not self.kl_coef:
            yield partial(check_without_effect, "kl_estimator", self.kl_estimator, "it goes with a kl_coef above 0")
        if self.kl_estimator is not None:
            yield partial(check_choice, "kl_estimator", self.kl_estimator, KL_ESTIMATORS)
            yield partial(_check_gradient, self.kl_estimator)
        yield partial(check_weight, "entropy_coef", self.entropy_coef)
        yield partial(check_choice, "off_policy", self.correction, CORRECTIONS)
        if self.correction == "none":
            other = f"it goes with an off_policy of {', '.join(CORRECTIONS[1:])}"
            yield partial(check_without_effect, "off_policy_cap", self.off_policy_cap, other)
        if self.off_policy_cap is not None:
            yield partial(check_number, "off_policy_cap", self.off_policy_cap, 1, LARGEST_CAP)
        if not self.correction.endswith("mask"):
            masks = f"it goes with an off_policy of {', '.join(name for name in CORRECTIONS if name.endswith('mask'))}"
            yield partial(check_without_effect, "off_policy_floor", self.off_policy_floor, masks)
        elif self.off_policy_floor is not None:
            yield partial(check_number, "off_policy_floor", self.off_policy_floor, 0, 1)

    @property
    def correction(self) -> Correction:
        """The value of `off_policy`, or "none" where it is not set."""
        return "none" if self.off_policy is None else self.off_policy

    @property
    def required_keys(self) -> tuple[str, ...]:
        """The key `advantages`, and the keys that the enabled terms read."""
        keys = ["advantages", *POLICY_LOSSES.named(self.policy_loss).keys]
        if self.kl_coef:
            keys.append("ref_log_probs")
        if self.correction != "none":
            keys.append("rollout_log_probs")
        return tuple(dict.fromkeys(keys))

    @property
    def needs_entropy(self) -> bool:
        """The need for entropies: True where there is an entropy bonus."""
        return self.entropy_coef != 0.0

    def zero_gradient_rows(self, batch: TensorDict | BatchView) -> Tensor:
        """Return bool[B], rows that add exactly nothing to loss and gradient, whatever the policy is.

        Rows without a trained token, and rows whose advantages are all zero while there is no KL nor entropy term.
        """
        from objectives.grpo_loss import zero_gradient_rows  # slow to load

        return zero_gradient_rows(self, batch)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss and metrics: policy_loss, those of the policy loss, approx_kl, mismatch/*, kl, entropy.

        ratio/clamped, kl/clamped and mismatch/clamped: the share of log-ratios beyond the bounds of `objectives.ratio`.
        """
        from objectives.grpo_loss import grpo_loss  # slow to load

        return grpo_loss(self, log_probs, entropy, batch, totals)


def _check_gradient(estimator: str) -> None:
    if estimator == "k1":
        raise ValueError("kl_estimator 'k1' has a zero expected gradient in a loss: use 'k2', 'k3', 'k1+' or 'k3+'")
