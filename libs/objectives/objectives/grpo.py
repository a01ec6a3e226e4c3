"""GRPO and its relatives: one clipped policy loss with the knobs that set the papers apart."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from objectives.kl import Estimator, estimate
from objectives.losses import Aggregation, Clipped, aggregate, cispo, ppo_clip
from objectives.objective import Counts, pair, silent, trained_mask
from objectives.off_policy import CORRECTIONS, Correction, mismatch, weights

if TYPE_CHECKING:
    from tensordict import TensorDict

    from seqpack.batches.packed import PackedBatch


@dataclass(frozen=True)
class GRPO:
    """Clipped policy loss over given per-token `advantages`; optional KL penalty, entropy bonus, off-policy weights.

    The old policy is the batch's `old_log_probs` where it has them. Without them the batch is taken as on-policy: the
    old policy is the current one, the ratio is 1 and its gradient is the policy gradient. `GRPO()` is token-mean GRPO
    without a KL term; the papers:

    - DeepSeekMath: `GRPO(aggregation="sequence", kl_coef=0.04)` with `advantages.grpo`
    - Dr. GRPO: `GRPO(aggregation="constant", max_tokens=N)` with `advantages.dr_grpo`
    - DAPO: `GRPO(clip_high=0.28)` with `advantages.grpo`
    """

    policy_loss: Literal["ppo", "cispo"] = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    aggregation: Aggregation = "token"
    max_tokens: int | None = None
    """For aggregation "constant": the fixed length to divide by."""
    kl_coef: float = 0.0
    """Weight of the KL penalty against `ref_log_probs`; 0 reads no reference."""
    kl_estimator: Estimator = "k3"
    entropy_coef: float = 0.0
    """Weight of the entropy bonus; 0 computes no entropy."""
    off_policy: Correction = "none"
    """Weights between the policy the update starts from and the sampler (`rollout_log_probs`)."""
    off_policy_cap: float = 2.0

    def __post_init__(self) -> None:
        if self.aggregation == "constant" and (self.max_tokens is None or self.max_tokens < 1):
            raise ValueError("aggregation 'constant' needs max_tokens >= 1: the longest answer the sampler may give")
        if self.aggregation != "constant" and self.max_tokens is not None:
            raise ValueError(f"max_tokens has no effect with aggregation {self.aggregation!r}: use 'constant'")
        if self.kl_coef and self.kl_estimator == "k1":
            raise ValueError("kl_estimator 'k1' has a zero expected gradient in a loss: use 'k2' or 'k3'")
        if self.policy_loss == "cispo" and self.dual_clip is not None:
            raise ValueError("dual_clip has no effect on policy_loss 'cispo': leave it out")
        if self.off_policy not in CORRECTIONS:
            raise ValueError(f"unknown off_policy {self.off_policy!r}: use one of {', '.join(CORRECTIONS)}")

    @property
    def required_keys(self) -> tuple[str, ...]:
        """`advantages`, and what the switched-on terms read."""
        keys = ["advantages"]
        if self.kl_coef:
            keys.append("ref_log_probs")
        if self.off_policy != "none":
            keys.append("rollout_log_probs")
        return tuple(keys)

    @property
    def needs_entropy(self) -> bool:
        """Only for the bonus."""
        return self.entropy_coef != 0.0

    def zero_gradient_rows(self, batch: "TensorDict") -> Tensor:
        """bool[B]: rows that add exactly nothing to loss and gradient, whatever the policy is: the engine may skip
        them.

        Those without a trained token, and those whose advantages are all zero while neither KL nor entropy has a term.
        """
        trained = batch["loss_mask"]
        if self.kl_coef or self.entropy_coef:
            return silent(trained)
        return silent(trained, batch["advantages"])

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: "PackedBatch", totals: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `objectives.objective.Objective`. Metrics: policy_loss, ratio, clip/*, mismatch/*, kl, entropy."""
        mask = trained_mask(batch)
        values = batch.values
        # A token that does not train must stay out of every exp: its log-probs are placeholders, and 0 * inf is not 0.
        current = torch.where(mask, log_probs, 0.0)
        start = _masked(values.get("old_log_probs"), mask, default=current.detach())
        clipped = self._policy(current, start, torch.where(mask, values["advantages"], 0.0))
        per_token, metrics = clipped.loss, _clip_metrics(clipped, current, start, mask)
        if self.dual_clip is not None:
            metrics["clip/dual"] = pair(clipped.clipped_dual.to(current.dtype), mask)
        rollout = values.get("rollout_log_probs")
        if rollout is not None:
            sampled = torch.where(mask, rollout, 0.0)
            metrics |= mismatch(start, sampled, mask)
            if self.off_policy != "none":
                cu_seqlens, cap = batch.cu_seqlens, self.off_policy_cap
                weight = weights(self.off_policy, start, sampled, mask, cu_seqlens, cap)
                per_token = per_token * weight
                metrics["off_policy/weight"] = pair(weight, mask)
        metrics["policy_loss"] = self._aggregate(per_token.detach(), mask, batch.cu_seqlens, totals)
        if self.kl_coef:
            penalty = estimate(current, torch.where(mask, values["ref_log_probs"], 0.0), self.kl_estimator)
            per_token = per_token + self.kl_coef * penalty
            metrics["kl"] = pair(penalty.detach(), mask)
        if entropy is not None:
            metrics["entropy"] = pair(entropy.detach(), mask)
            if self.entropy_coef:
                per_token = per_token - self.entropy_coef * torch.where(mask, entropy, 0.0)
        elif self.entropy_coef:
            raise ValueError("entropy_coef is set but no entropy was given: the engine must honour needs_entropy")
        return self._aggregate(per_token, mask, batch.cu_seqlens, totals), metrics

    def _policy(self, log_probs: Tensor, old: Tensor, advantages: Tensor) -> Clipped:
        if self.policy_loss == "cispo":
            return cispo(log_probs, old, advantages, self.clip_low, self.clip_high)
        return ppo_clip(log_probs, old, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def _aggregate(self, per_token: Tensor, mask: Tensor, cu_seqlens: Tensor, totals: Counts) -> Tensor:
        return aggregate(
            per_token, mask, cu_seqlens, self.aggregation, totals.tokens, totals.sequences, self.max_tokens
        )


def _masked(values: Tensor | None, mask: Tensor, default: Tensor) -> Tensor:
    return default if values is None else torch.where(mask, values, 0.0)


def _clip_metrics(clipped: Clipped, current: Tensor, start: Tensor, mask: Tensor) -> dict[str, Tensor]:
    gap = (current - start).detach()
    return {
        "ratio": pair(clipped.ratio, mask),
        "clip/low": pair(clipped.clipped_low.to(gap.dtype), mask),
        "clip/high": pair(clipped.clipped_high.to(gap.dtype), mask),
        "approx_kl": pair(torch.expm1(gap) - gap, mask),
    }
