"""Hold losses, advantages and KL estimators to verl's own code: print the largest difference of values and gradients.

Run by hand: python libs/objectives/benchmarks/against_verl.py FOLDER..., the folders in which verl's wheel and what its
`core_algos` imports are unpacked (codetiming, hydra-core, omegaconf, orjson, cachetools, pandas). Measured with verl
0.9.1: 8e-8 at most for a loss (verl adds 1e-8 to counts), 6e-10 for its gradient, 2e-5 for an advantage (verl adds 1e-8
to a variance, we 1e-6 to its root).
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from objectives import advantages, kl, losses

LENGTHS = (7, 3, 5, 1, 6)
SHAPE = (len(LENGTHS), max(LENGTHS))
GROUPS = torch.tensor([0, 0, 1, 1, 1])


class Rows:
    """The same tokens padded, as verl has them, and packed."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.mask = torch.arange(SHAPE[1]) < torch.tensor(LENGTHS)[:, None]
        self.new = -2 * torch.rand(SHAPE, generator=draw, dtype=torch.float64)
        self.old = (self.new + 0.3 * torch.randn(SHAPE, generator=draw, dtype=torch.float64)).clamp(max=-0.01)
        self.advantages = torch.randn(SHAPE[0], 1, generator=draw, dtype=torch.float64).expand(SHAPE).contiguous()
        self.rewards = torch.rand(SHAPE[0], generator=draw)
        self.ends = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)

    def packed(self, padded: Tensor) -> Tensor:
        """Return the tokens of a padded tensor one sequence after another."""
        return padded[self.mask]


def compare_losses(rows: Rows, core: Any, config: Callable[..., Any]) -> None:
    """Print the differences of each policy loss and its gradient."""
    shape = (torch.ones(sum(LENGTHS), dtype=torch.bool), rows.ends)
    for ours, theirs, how, given, theirs_own in [
        ("ppo_clip", "vanilla", "token", (0.2, 0.28, 3.0), {"clip_ratio_c": 3.0}),
        ("cispo", "cispo", "token", (0.2, 0.28), {}),
        ("gspo", "gspo", "sequence", (0.03, 0.04), {}),
        ("gmpo", "geo_mean", "sequence", (0.1, 0.2), {}),
        ("sapo", "sapo", "sequence", (), {"tau_pos": 1.0, "tau_neg": 1.05}),
        ("dppo_tv", "dppo_tv", "token", (0.1, 0.15, 3.0), {"clip_ratio_c": 3.0}),
        ("dppo_kl", "dppo_kl", "token", (0.02, 0.03, 3.0), {"clip_ratio_c": 3.0}),
    ]:
        new, again = rows.new.clone().requires_grad_(), rows.new.clone().requires_grad_()
        bounds = dict(zip(("clip_ratio_low", "clip_ratio_high"), given, strict=False))
        settings = config(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **bounds, **theirs_own)
        mean = {"token": "token-mean", "sequence": "seq-mean-token-mean"}[how]
        want, _ = core.get_policy_loss_fn(theirs)(rows.old, new, rows.advantages, rows.mask.double(), mean, settings)
        read = [rows.packed(x) for x in (again, rows.old, rows.advantages)]
        extra = shape if ours in ("gspo", "gmpo") else ()
        tokens = getattr(losses, ours)(*read, *extra, *given).loss
        aggregation: losses.Aggregation = "token" if how == "token" else "sequence"
        got = losses.aggregate(tokens, *shape, aggregation, sum(LENGTHS), len(LENGTHS))
        (slope,), (wanted,) = torch.autograd.grad(got, again), torch.autograd.grad(want, new)
        print(f"{ours:10} loss {float((got - want).detach().abs()):.1e}, gradient {largest(slope - wanted):.1e}")


def compare_covariance(rows: Rows, core: Any, config: Callable[..., Any], loss_config: Callable[..., Any]) -> None:
    """Print the differences of Clip-Cov and KL-Cov, whose tokens are chosen by the present policy, as verl does.

    Clip-Cov draws among the tokens within bounds: here all of them. verl spares those that PPO's clip cuts already,
    which have no gradient: here its bounds cut none.
    """
    mask, ends = torch.ones(sum(LENGTHS), dtype=torch.bool), rows.ends
    for name, share, bounds in [("clip_cov", 1.0, (-0.1, 0.3)), ("kl_cov", 0.2, None)]:
        new, again = rows.new.clone().requires_grad_(), rows.new.clone().requires_grad_()
        low, high = bounds or (1.0, 5.0)
        loss = {"clip_cov_ratio": share, "clip_cov_lb": low, "clip_cov_ub": high, "kl_cov_ratio": share}
        settings = config(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.99, clip_ratio_high=99.0,
            policy_loss=loss_config(loss_mode=name, ppo_kl_coef=0.7, **loss),
        )  # fmt: skip
        read = [rows.old, new, rows.advantages, rows.mask.double(), "token-mean", settings]
        want, _ = core.get_policy_loss_fn(name)(*read)
        columns = rows.packed(rows.advantages), rows.packed(rows.new), mask
        scores, policy, trained = (torch.nested.nested_tensor_from_jagged(x, ends.long()) for x in columns)
        chosen = losses.high_covariance(scores, policy, trained, share, bounds)
        given = [rows.packed(x) for x in (again, rows.old, rows.advantages)]
        tokens = getattr(losses, name)(*given, chosen.values(), *((0.99, 99.0) if bounds else (0.7,))).loss
        got = losses.aggregate(tokens, mask, ends, "token", sum(LENGTHS), len(LENGTHS))
        (slope,), (wanted,) = torch.autograd.grad(got, again), torch.autograd.grad(want, new)
        told = f"{name:10} loss {float((got - want).detach().abs()):.1e}, gradient {largest(slope - wanted):.1e}"
        print(f"{told}, {int(chosen.values().sum())} of {sum(LENGTHS)} tokens chosen")


def compare_advantages(rows: Rows, core: Any) -> None:
    """Print the difference of each advantage."""
    ends = torch.tensor(LENGTHS)
    scores = torch.zeros(SHAPE).scatter_(1, ends[:, None] - 1, rows.rewards[:, None])
    given = (scores, rows.mask.float())
    config = type("Config", (dict,), {"gamma": 1.0})()
    for name, want, got in [
        ("grpo", core.compute_grpo_outcome_advantage(*given, GROUPS.numpy()), advantages.grpo(rows.rewards, GROUPS)),
        ("rloo", core.compute_rloo_outcome_advantage(*given, GROUPS.numpy()), advantages.rloo(rows.rewards, GROUPS)),
        (
            "reinforce_plus_plus",
            core.compute_reinforce_plus_plus_outcome_advantage(*given, config=config),
            advantages.reinforce_plus_plus(rows.rewards, ends),
        ),
        (
            "reinforce_plus_plus_baseline",
            core.compute_reinforce_plus_plus_baseline_outcome_advantage(*given, GROUPS.numpy()),
            advantages.reinforce_plus_plus_baseline(rows.rewards, GROUPS, ends),
        ),
    ]:
        print(f"{name:30} {largest(want[0] - got[:, None] * rows.mask):.1e}")


def compare_kl(rows: Rows, core: Any) -> None:
    """Print the differences of each KL estimator and its gradient."""
    for name in kl.ESTIMATORS:
        new, again = rows.new.clone().requires_grad_(), rows.new.clone().requires_grad_()
        want, got = core.kl_penalty(new, rows.old, name), kl.estimate(again, rows.old, name)  # type: ignore[arg-type]
        slope = torch.autograd.grad(got.sum(), again)[0] - torch.autograd.grad(want.sum(), new)[0]
        print(f"{name:10} value {largest(got - want):.1e}, gradient {largest(slope):.1e}")


def largest(difference: Tensor) -> float:
    """Return the largest absolute value."""
    return float(difference.detach().abs().max())


def main() -> None:
    """Compare with the verl in the folders of the command line."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.path[:0] = sys.argv[1:]
    from verl.trainer.ppo import core_algos  # of the folders
    from verl.workers.config import ActorConfig, PolicyLossConfig

    rows = Rows()
    compare_losses(rows, core_algos, ActorConfig)
    compare_covariance(rows, core_algos, ActorConfig, PolicyLossConfig)
    compare_advantages(rows, core_algos)
    compare_kl(rows, core_algos)


if __name__ == "__main__":
    main()
