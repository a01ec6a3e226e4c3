"""What a policy loss is: what it reads, what it returns, and the registry of those an objective chooses by name.

A *policy loss* is what `GRPO(policy_loss=NAME)` computes: a function of `PolicyTokens` and of the options it declares,
which returns a `TokenLoss`, or the loss alone. Write one in a file of your own, and name it FILE.py:NAME:

    def reinforce(tokens, scale: float = 1.0):
        return scale * policy_gradient(tokens.log_probs, tokens.advantages)

- `POLICY_LOSSES`: the registry, name -> `PolicyLoss`. `register_policy_loss` gives a loss a name, and says more of it.
- Of the options clip_low, clip_high and dual_clip, which are fields of `GRPO`, a registered loss gets those that it
  declares there, with the defaults it declares; setting another one is an error. Its other parameters are options by
  their own types and defaults (`seqpack.extensions.options`): `GRPO(policy_loss_options=("scale=2",))`.
- What a loss returns is held to its contract: f[T] of at least float32, finite or not, through which the gradient
  flows. `GRPO` masks it, weighs it and divides it by the counts of the whole batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from objectives.choices import OPTIONS, POLICY_LOSSES
from objectives.sums import wide
from seqpack.batches.packed import PackedBatch
from seqpack.extensions.options import bound

OURS = frozenset(
    ("approx_kl", "ratio/clamped", "policy_loss", "off_policy/weight", "kl", "kl/clamped", "entropy", "nll")
)
"""Metrics that `GRPO` and `SFT` report themselves, and those that begin with "mismatch/"."""


class TokenLoss(NamedTuple):
    """A policy loss: `loss` f[T], and what to report, name -> bool or f[T], each averaged over the trained tokens."""

    loss: Tensor
    metrics: dict[str, Tensor]


class PolicyTokens(NamedTuple):
    """What a policy loss reads, by packed token. All but `log_probs` are constants, and 0 where nothing is trained.

    `log_probs` f[T] of the policy that trains; `old_log_probs` f[T] of the policy the update started from;
    `advantages` f[T]; `mask` bool[T], the trained tokens; `batch` with its `cu_seqlens` and further `values`.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    mask: Tensor
    batch: PackedBatch


@dataclass(frozen=True)
class PolicyLoss:
    """A named policy loss; see `register_policy_loss`."""

    name: str
    function: Callable[..., Any]
    defaults: Mapping[str, float | None]
    keys: tuple[str, ...]
    scales_with_advantage: bool

    def with_options(self, words: Sequence[str], field: str = "policy_loss_options") -> Callable[..., Any]:
        """Return the function with the options that NAME=VALUE words of a field give it; ValueError: it does not take
        them."""
        return bound(field, self.name, self.function, words, self.defaults, first=1)

    def checked(self, result: TokenLoss | Tensor, tokens: PolicyTokens) -> TokenLoss:
        """Return what the function returned, of one number a token; ValueError where it is something else."""
        result_of_loss = TokenLoss(result, {}) if isinstance(result, Tensor) else TokenLoss(*result)
        for name, value in {"loss": result_of_loss.loss, **result_of_loss.metrics}.items():
            if not isinstance(value, Tensor) or value.shape != tokens.mask.shape:
                got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(
                    f"the policy loss {self.name!r} returned {name} of {got}: it gives one number a token, "
                    f"{tuple(tokens.mask.shape)} here; GRPO sums them and divides by the counts of the whole batch"
                )
        if taken := [name for name in result_of_loss.metrics if name in OURS or name.startswith("mismatch/")]:
            raise ValueError(
                f"the policy loss {self.name!r} reports {', '.join(taken)}, which the objective reports itself: give "
                f"another name, such as own/{taken[0]}"
            )
        if not result_of_loss.loss.is_floating_point() or result_of_loss.loss.dtype.itemsize < torch.float32.itemsize:
            raise ValueError(
                f"the policy loss {self.name!r} returned {result_of_loss.loss.dtype}: compute in float32 at least"
            )
        if tokens.log_probs.requires_grad and not result_of_loss.loss.requires_grad:
            raise ValueError(
                f"the policy loss {self.name!r} has no gradient: it must be made from tokens.log_probs, not detached"
            )
        return result_of_loss


def entry_of(spec: str, function: Any) -> PolicyLoss:
    """Return the entry of a function of `PolicyTokens` that is not registered; ValueError where it is none."""
    if not callable(function):
        raise ValueError(
            f"--loss {spec} is a {type(function).__name__}: a function of `objectives.losses.PolicyTokens` is needed"
        )
    return PolicyLoss(spec, function, MappingProxyType({}), (), scales_with_advantage=False)


def own_token_loss(
    spec: str, words: Sequence[str], log_probs: Tensor, mask: Tensor, batch: PackedBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of each token, and its metrics, by a user's function where there is no reward: every advantage is
    1, and the old policy is the present one."""
    current = torch.where(mask, wide(log_probs), 0.0)
    tokens = PolicyTokens(current, current.detach(), mask.to(current.dtype), mask, batch)
    entry = POLICY_LOSSES.named(spec)
    result = entry.checked(entry.with_options(words, "loss_options")(tokens, **entry.defaults), tokens)
    return wide(result.loss), {name: value.to(current.dtype) for name, value in result.metrics.items()}


def register_policy_loss(
    name: str, *, keys: tuple[str, ...] = (), scales_with_advantage: bool = False, **defaults: float | None
) -> Callable[[Callable[..., TokenLoss]], Callable[..., TokenLoss]]:
    """Register the decorated function `(tokens: PolicyTokens, **options) -> TokenLoss`.

    `defaults`: the options it takes (of `OPTIONS`) with their default values. `keys`: keys of the batch that it
    reads besides the advantages. `scales_with_advantage`: whether a token of advantage 0 adds exactly nothing to loss
    and gradient, so that an engine may skip rows of such tokens. Raises ValueError for a name that is taken and for
    options that `GRPO` does not have.
    """
    unknown = sorted(set(defaults) - set(OPTIONS))
    if unknown:
        raise ValueError(f"policy loss {name!r} declares unknown options {unknown}: GRPO has {', '.join(OPTIONS)}")

    def register(function: Callable[..., TokenLoss]) -> Callable[..., TokenLoss]:
        entry = PolicyLoss(name, function, MappingProxyType(defaults), tuple(keys), scales_with_advantage)
        POLICY_LOSSES.add(name, entry)
        return function

    return register
