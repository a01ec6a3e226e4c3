"""The loss of `GRPO` over packed tokens, and its metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from objectives.kl import estimate
from objectives.losses import POLICY_LOSSES, PolicyTokens, aggregate
from objectives.objective import rows_without_gradient, trained_mask
from objectives.off_policy import mismatch, weights
from objectives.ratio import clamped, ratio_excess
from objectives.sums import pair, wide
from seqpack.batches.packed import PackedBatch
from seqpack.batches.view import BatchView, Totals

if TYPE_CHECKING:  # it imports this module when its loss is asked for
    from objectives.grpo import GRPO


def zero_gradient_rows(objective: GRPO, batch: TensorDict | BatchView) -> Tensor:
    """Return what `GRPO.zero_gradient_rows` does."""
    scales = POLICY_LOSSES.named(objective.policy_loss).scales_with_advantage
    scales = scales and not (objective.kl_coef or objective.entropy_coef)
    return rows_without_gradient(batch, "advantages" if scales else None)


def grpo_loss(
    objective: GRPO, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and metrics of `GRPO`, as its call describes them."""
    mask = trained_mask(batch)
    values = batch.values
    # A token that does not train must stay out of every exp: its log-probs are placeholders, and 0 * inf is not 0.
    current = torch.where(mask, wide(log_probs), 0.0)
    old = values.get("old_log_probs")
    start = current.detach() if old is None else torch.where(mask, wide(old), 0.0)
    per_token, metrics = _policy(objective, current, start, mask, batch)
    rollout = values.get("rollout_log_probs")
    if rollout is not None:
        sampled = torch.where(mask, wide(rollout), 0.0)
        metrics |= mismatch(start, sampled, mask)
        if objective.correction != "none":
            cap = 2.0 if objective.off_policy_cap is None else objective.off_policy_cap
            floor = objective.off_policy_floor
            weight = weights(objective.correction, start, sampled, mask, batch.cu_seqlens, cap, floor)
            per_token = per_token * weight
            metrics["off_policy/weight"] = pair(weight, mask)
    metrics["policy_loss"] = _aggregate(objective, per_token.detach(), mask, batch, totals)
    if objective.kl_coef:
        reference = torch.where(mask, wide(values["ref_log_probs"]), 0.0)
        penalty = estimate(current, reference, objective.kl_estimator or "k3")
        per_token = per_token + objective.kl_coef * penalty
        metrics["kl"] = pair(penalty, mask)
        metrics["kl/clamped"] = pair(clamped(reference, current), mask)
    if entropy is not None:
        metrics["entropy"] = pair(entropy, mask)
        if objective.entropy_coef:
            per_token = per_token - objective.entropy_coef * torch.where(mask, wide(entropy), 0.0)
    elif objective.entropy_coef:
        raise ValueError("entropy_coef is set but no entropy was given: the engine must honour needs_entropy")
    return _aggregate(objective, per_token, mask, batch, totals), metrics


def _policy(
    objective: GRPO, current: Tensor, start: Tensor, mask: Tensor, batch: PackedBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the policy loss of each token, and its metrics."""
    loss = POLICY_LOSSES.named(objective.policy_loss)
    own = {name: getattr(objective, name) for name in loss.defaults}
    options = {name: default if own[name] is None else own[name] for name, default in loss.defaults.items()}
    advantages = torch.where(mask, wide(batch.values["advantages"]), 0.0)
    tokens = PolicyTokens(current, start, advantages, mask, batch)
    result = loss.checked(loss.with_options(objective.policy_loss_options)(tokens, **options), tokens)
    now = current.detach()
    metrics = {"approx_kl": pair(ratio_excess(now, start), mask), "ratio/clamped": pair(clamped(now, start), mask)}
    for name, value in result.metrics.items():
        metrics[name] = pair(value.to(now.dtype), mask)
    return wide(result.loss), metrics


def _aggregate(objective: GRPO, per_token: Tensor, mask: Tensor, batch: PackedBatch, totals: Totals) -> Tensor:
    return aggregate(
        per_token,
        mask,
        batch.cu_seqlens,
        objective.aggregation,
        totals.tokens,
        totals.answers,
        objective.max_tokens,
        batch.values.get("episode_tokens"),
    )
