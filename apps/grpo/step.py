"""One GRPO step on a page: sample and reward, compare within groups, train, hand over the weights."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tensordict import TensorDict
from torch import Tensor

from apps.grpo.config import GrpoConfig
from apps.grpo.reporting.episode_metrics import environment_metrics, episode_metrics
from apps.grpo.reporting.timeline import Timeline
from apps.grpo.sampling.memory_turns import sampling_turn
from apps.grpo.sampling.session import Session
from apps.grpo.sampling.vllm import prove_owed, prove_weights
from engines import TrainEngine, base_policy
from objectives.advantages import ESTIMATORS, first_rows, per_sequence, per_token
from objectives.off_policy import mismatch_meter
from rollout import Episode, TaskRow, to_batch
from rollout.seeds import derive_seed
from seqpack import index_select


@dataclass(frozen=True)
class StepResult:
    """What a step did: its episodes, the advantage of each (0 where it failed), its metrics, its tasks by group.

    `rows` is None where they are the tasks of that step's number.
    """

    episodes: list[Episode]
    advantages: list[float]
    metrics: dict[str, float]
    rows: Sequence[TaskRow] | None = None


def grpo_step(
    config: GrpoConfig, session: Session, engine: TrainEngine, step: int, timeline: Timeline | None = None
) -> StepResult:
    """Do step number `step`, from 0; then the sampler holds the new weights. `timeline` is told who was busy when."""
    begun = time.perf_counter()
    with sampling_turn(session, engine):
        episodes = session.sample(step)  # each with the reward that its task gave
    prove_owed(session, engine, episodes)
    batch = to_batch(episodes)
    sampled = time.perf_counter()
    batch["advantages"] = advantages_of(batch, config, step)
    metrics = train_on(batch, config, engine)
    trained = time.perf_counter()
    handed = session.sync(engine)
    ended = time.perf_counter()
    if timeline is not None:
        timeline.add("sampler", "sample", begun, sampled)
        timeline.add("trainer", "train", sampled, trained)
        timeline.add("weights", "sync", trained, ended)
    metrics |= handed.metrics | prove_weights(session, engine, episodes)

    metrics |= rollout_metrics(episodes, session.environment_of)
    metrics |= {
        "weights/version": float(session.sampler.version),
        "time/rollout_s": sampled - begun,
        "time/train_s": trained - sampled,
        "time/export_and_update_weights_s": ended - trained,
        "time/step_s": ended - begun,
    }
    metrics["tokens_per_second"] = metrics["rollout/tokens"] / metrics["time/step_s"]
    return StepResult(episodes, episode_advantages(batch, len(episodes)), metrics)


def rollout_metrics(episodes: Sequence[Episode], environment_of: Callable[[str], str | None]) -> dict[str, float]:
    """Return what a step's episodes were like, and how many tokens they have."""
    segments = [segment for episode in episodes for segment in episode.segments]
    metrics = reward_metrics(episodes) | episode_metrics(episodes) | environment_metrics(episodes, environment_of)
    return metrics | {
        "rollout/tokens": float(sum(len(s.ids) for s in segments)),
        "rollout/sampled_tokens": float(sum(s.sampled for s in segments)),
        "rollout/policy_version": float(max(max(s.policy_versions) for s in segments)),
        "rollout/failed_episodes": float(sum(episode.error is not None for episode in episodes)),
        "rollout/retried_episodes": float(sum(episode.attempt > 0 for episode in episodes)),
    }


def advantages_of(batch: TensorDict, config: GrpoConfig, step: int) -> Tensor:
    """Jagged (B, j): how much better each answer was than its group's; the control run deals them to wrong answers."""
    advantages = ESTIMATORS.named(config.advantage)(batch)
    if config.control == "shuffled-advantages":
        generator = torch.Generator().manual_seed(derive_seed(config.seed, "shuffle", step))
        scores = per_sequence(advantages, batch["loss_mask"])
        _, row_of, of_row = first_rows(batch["episode"])
        dealt = scores[row_of][torch.randperm(len(row_of), generator=generator)]
        return per_token(dealt[of_row], batch["loss_mask"])
    return advantages


def episode_advantages(batch: TensorDict, count: int) -> list[float]:
    """Return the advantage of each of `count` episodes, that of its first row; 0 where it has none."""
    scores = per_sequence(batch["advantages"], batch["loss_mask"])
    found = [0.0] * count
    episodes, row_of, _ = first_rows(batch["episode"])
    for episode, row in zip(episodes.tolist(), row_of.tolist(), strict=True):
        found[episode] = float(scores[row])
    return found


def correction_line(config: GrpoConfig) -> str | None:
    """Return what a run says once of off-policy weights that nobody asked for by name; None where there are none."""
    chosen = config.corrected_objective.off_policy
    if config.objective.off_policy is not None or chosen == "none":
        return None
    return f"off-policy weights: {chosen}, as answers are sampled ahead of training (else name --objective.off-policy)"


def train_on(batch: TensorDict, config: GrpoConfig, engine: TrainEngine) -> dict[str, float]:
    """Make the optimizer steps of one batch, `epochs` times `mini_batches`; the means of their metrics.

    All rows of an episode are in one mini-batch; there are fewer than asked for where episodes are.
    """
    if config.epochs * config.mini_batches > 1:
        # Later updates of this batch are off-policy: they need the log-probs of the policy that it started from.
        batch["old_log_probs"] = engine.forward(batch)["log_probs"]
    if config.objective.kl_coef:
        with base_policy(engine) as reference:
            batch["ref_log_probs"] = reference.forward(batch)["log_probs"]
    _, _, episode_of = first_rows(batch["episode"])
    parts = [(episode_of % config.mini_batches == part).nonzero()[:, 0].tolist() for part in range(config.mini_batches)]
    parts = [part for part in parts if part]
    objective = config.corrected_objective
    results = [
        engine.train_batch(index_select(batch, part) if len(parts) > 1 else batch, objective)
        for _ in range(config.epochs)
        for part in parts
    ]
    means = {name: sum(result[name] for result in results) / len(results) for name in results[0]}
    means["mismatch/abs/max"] = max(result["mismatch/abs/max"] for result in results)
    means = mismatch_meter(means)
    difference = {
        "log_prob_difference": means.pop("mismatch/abs"),
        "log_prob_difference_max": means.pop("mismatch/abs/max"),
    }
    named = {f"train/{name}": value for name, value in means.items()}
    return named | difference | {"train/updates": float(len(results))}


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean reward of the episodes that were scored; the shares of groups that solve their task, and that
    teach."""
    groups: dict[int, list[float]] = {}
    for episode in episodes:
        if episode.error is None:
            groups.setdefault(episode.group, []).append(episode.reward)
    low, high = (torch.tensor([choose(rewards) for rewards in groups.values()]) for choose in (min, max))
    return {
        "reward": torch.tensor([reward for rewards in groups.values() for reward in rewards]).mean().item(),
        "reward/solved_groups": (low > 0).float().mean().item(),
        "reward/mixed_groups": (low < high).float().mean().item(),
    }
