"""One GRPO step on a page: sample and reward, compare within groups, train, hand over the weights."""

import time
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from apps.grpo.config import GrpoConfig
from apps.grpo.session import Session
from engines import TrainEngine
from objectives.advantages import ESTIMATORS, per_sequence, per_token
from rollout import Trajectory, to_batch
from rollout.episode import derive_seed
from seqpack import index_select


@dataclass(frozen=True)
class StepResult:
    """What a step did: its episodes, the advantage of each (the mean of its tokens'), and its metrics."""

    trajectories: list[Trajectory]
    advantages: list[float]
    metrics: dict[str, float]


def grpo_step(config: GrpoConfig, session: Session, engine: TrainEngine, step: int) -> StepResult:
    """Do step number `step`, from 0; afterwards the sampler holds the new weights."""
    begun = time.perf_counter()
    trajectories = session.sample(step)  # each with the reward that its task gave
    batch = to_batch(trajectories)
    sampled = time.perf_counter()
    batch["advantages"] = advantages_of(batch, config, step)
    metrics = train_on(batch, config, engine)
    trained = time.perf_counter()
    size = session.sync(engine)
    ended = time.perf_counter()

    metrics |= reward_metrics(batch["reward"].view(-1, config.group_size))
    metrics |= {
        "rollout/tokens": float(sum(len(t.ids) for t in trajectories)),
        "rollout/sampled_tokens": float(sum(sum(t.loss_mask) for t in trajectories)),
        "rollout/policy_version": float(max(max(t.policy_versions) for t in trajectories)),
        "weights/version": float(session.sampler.version),
        "weights/bytes": float(size),
        "time/rollout_s": sampled - begun,
        "time/train_s": trained - sampled,
        "time/export_and_update_weights_s": ended - trained,
        "time/step_s": ended - begun,
    }
    metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step_s"]
    scores = per_sequence(batch["advantages"], batch["loss_mask"])
    return StepResult(trajectories, scores.tolist(), metrics)


def advantages_of(batch: TensorDict, config: GrpoConfig, step: int) -> Tensor:
    """Jagged (B, j): how much better each answer was than its group's; the control run deals them to wrong answers."""
    advantages = ESTIMATORS.named(config.advantage)(batch)
    if config.control == "shuffled-advantages":
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "shuffle", step))
        scores = per_sequence(advantages, batch["loss_mask"])
        return per_token(scores[torch.randperm(len(scores), generator=generator)], batch["loss_mask"])
    return advantages


def train_on(batch: TensorDict, config: GrpoConfig, engine: TrainEngine) -> dict[str, float]:
    """Make the optimizer steps of one batch, `epochs` times `mini_batches`; the means of their metrics."""
    if config.epochs * config.mini_batches > 1:
        # Later updates of this batch are off-policy: they need the log-probs of the policy that it started from.
        batch["old_log_probs"] = engine.forward(batch)["log_probs"]
    rows = len(batch["reward"])
    parts = [list(range(part, rows, config.mini_batches)) for part in range(config.mini_batches)]
    results = [
        engine.train_batch(index_select(batch, part) if len(parts) > 1 else batch, config.objective)
        for _ in range(config.epochs)
        for part in parts
    ]
    means = {f"train/{name}": sum(result[name] for result in results) / len(results) for name in results[0]}
    difference = {
        "log_prob_difference": means.pop("train/mismatch/abs"),
        "log_prob_difference_max": max(result["mismatch/abs/max"] for result in results),
    }
    del means["train/mismatch/abs/max"]
    return means | difference | {"train/updates": float(len(results))}


def reward_metrics(rewards: Tensor) -> dict[str, float]:
    """The mean of `rewards` f[groups, group_size], and the shares of groups that solve their task, and that teach."""
    low, high = rewards.min(1).values, rewards.max(1).values
    return {
        "reward": rewards.mean().item(),
        "reward/solved_groups": (low > 0).float().mean().item(),
        "reward/mixed_groups": (low < high).float().mean().item(),
    }
