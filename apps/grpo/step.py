"""One GRPO step, the whole algorithm on a page: sample, compare within groups, train, hand over the weights."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict

from apps.grpo.config import GrpoConfig
from apps.grpo.session import Session
from engines import TrainEngine
from objectives import advantages
from rollout import Trajectory, to_batch
from rollout.episode import derive_seed
from seqpack import index_select


@dataclass(frozen=True)
class StepResult:
    """What a step did: its episodes, the advantage of each, and its metrics."""

    trajectories: list[Trajectory]
    advantages: list[float]
    metrics: dict[str, float]


def grpo_step(config: GrpoConfig, session: Session, engine: TrainEngine, step: int) -> StepResult:
    """Step number `step`, from 0; afterwards the sampler holds the weights of version step + 1."""
    begun = time.perf_counter()
    trajectories = session.sample(step)
    sampled = time.perf_counter()
    batch = to_batch(trajectories)
    scores = advantages_of(batch, config, step)
    batch["advantages"] = advantages.per_token(scores, batch["loss_mask"])
    metrics = train(batch, scores, config, engine)
    trained = time.perf_counter()
    size = session.sync(engine, step + 1)
    ended = time.perf_counter()

    tokens = sum(len(t.ids) for t in trajectories)
    rewards = batch["reward"]
    metrics |= {
        "reward": rewards.mean().item(),
        "reward/solved_groups": _share(rewards, config.group_size, lambda r: r.min(1).values > 0),
        "reward/mixed_groups": _share(rewards, config.group_size, lambda r: r.min(1).values < r.max(1).values),
        "rollout/tokens": float(tokens),
        "rollout/sampled_tokens": float(sum(sum(t.loss_mask) for t in trajectories)),
        "rollout/policy_version": float(max(max(t.policy_versions) for t in trajectories)),
        "weights/version": float(session.sampler.version),
        "weights/bytes": float(size),
        "time/rollout_s": sampled - begun,
        "time/train_s": trained - sampled,
        "time/export_and_update_weights_s": ended - trained,
        "time/step_s": ended - begun,
        "tokens_per_second": tokens / (ended - begun),
    }
    return StepResult(trajectories, scores.tolist(), metrics)


def advantages_of(batch: TensorDict, config: GrpoConfig, step: int) -> torch.Tensor:
    """f32[B]: each answer's reward against its group's; dealt to the wrong answers in the control run."""
    scores = getattr(advantages, config.advantage)(batch["reward"], batch["group"])
    if config.control == "shuffled-advantages":
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "shuffle", step))
        scores = scores[torch.randperm(len(scores), generator=generator)]
    return scores


def train(batch: TensorDict, scores: torch.Tensor, config: GrpoConfig, engine: TrainEngine) -> dict[str, float]:
    """The optimizer steps of one batch. Metrics are means over them; with nothing to learn from there are none."""
    rows = [i for i, score in enumerate(scores.tolist()) if score or not config.drop_uniform_groups]
    if not rows:
        return {"train/sequences": 0.0}
    if len(rows) < len(scores):
        batch = index_select(batch, rows)
    if config.epochs * config.mini_batches > 1:
        # Later updates of this batch are off-policy: they need the log-probs of the policy that it started from.
        batch["old_log_probs"] = engine.forward(batch)["log_probs"]
    parts = min(config.mini_batches, len(rows))
    results = [
        engine.train_batch(
            index_select(batch, list(range(part, len(rows), parts))) if parts > 1 else batch, config.objective
        )
        for _ in range(config.epochs)
        for part in range(parts)
    ]
    means = {f"train/{name}": sum(result[name] for result in results) / len(results) for name in results[0]}
    agreement = {
        "log_prob_difference": means.pop("train/mismatch/abs"),
        "log_prob_difference_max": max(result["mismatch/abs/max"] for result in results),
    }
    del means["train/mismatch/abs/max"]
    return means | agreement | {"train/sequences": float(len(rows)), "train/updates": float(len(results))}


def _share(rewards: torch.Tensor, group_size: int, test: Callable[[torch.Tensor], torch.Tensor]) -> float:
    return test(rewards.view(-1, group_size)).float().mean().item()
