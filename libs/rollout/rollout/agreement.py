"""How far the sampler's log-probs and the trainer's lie apart on the same tokens."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class LogProbDifference(NamedTuple):
    """Mean and maximum of |trainer - sampler| over trained tokens, and the mean of (sampler - trainer), an estimate
    of KL(sampler || trainer) in nats.
    """

    mean: float
    max: float
    kl: float


def log_prob_difference(batch: Mapping[str, Tensor], key: str = "old_log_probs") -> LogProbDifference:
    """Compare `batch[key]` with `batch["rollout_log_probs"]` where `loss_mask` is true. Takes jagged (B, j) tensors (or
    any three of one shape). Zero where nothing is trained. ValueError names a missing key.
    """
    for name in (key, "rollout_log_probs", "loss_mask"):
        if name not in batch.keys():  # noqa: SIM118  a TensorDict's own `in` asks for values
            raise ValueError(f"the batch has no {name!r}")
    mask, ours, theirs = (_values(batch[name]) for name in ("loss_mask", key, "rollout_log_probs"))
    gap = (ours.double() - theirs.double())[mask]
    if gap.numel() == 0:
        return LogProbDifference(0.0, 0.0, 0.0)
    return LogProbDifference(gap.abs().mean().item(), gap.abs().max().item(), -gap.mean().item())


def _values(x: Tensor) -> Tensor:
    return x.values() if x.is_nested else x
