"""Rewards as a run changes them before answers are compared: by length, and by the KL divergence from the reference."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from apps.grpo.config import GrpoConfig
from engines import TrainEngine, base_policy
from objectives.advantages import COMPONENTS, TOKEN_REWARDS, WEIGHTS, estimate, first_rows, response_lengths
from objectives.kl import k1
from objectives.shaping import length_reward, overlong_filter, overlong_penalty
from objectives.token_advantages import at_turn_ends, normalized, returns_with_kl
from rollout.episodes.summary import AnyEpisode
from schedules.reporting.episode_metrics import TRUNCATED
from seqpack.batches.jagged import flattened, ragged


def shape(batch: TensorDict, episodes: Sequence[AnyEpisode], config: GrpoConfig, engine: TrainEngine) -> None:
    """Change rewards and mask of a batch as `config.shaping` says, and score it where KL is in the reward. Collective
    then."""
    shaping = config.shaping
    of_rows = [episodes[place] for place in batch["episode"].tolist()]
    if config.advantage == "gdpo" or shaping.reward_weights:
        _weigh(batch, of_rows, config)
    if config.advantage == "turn_grpo":
        batch[TOKEN_REWARDS] = _turn_rewards(of_rows, batch["loss_mask"])
    _, first, of_row = first_rows(batch["episode"])
    lengths, reward, groups = (x[first] for x in (response_lengths(batch), batch["reward"], batch["group"]))
    added = torch.zeros_like(reward)
    if shaping.overlong_buffer:
        added += overlong_penalty(lengths, config.sampling.max_new_tokens, shaping.overlong_buffer)
    if shaping.length_reward:
        added += shaping.length_reward * length_reward(lengths, reward > 0, groups)
    batch["reward"] = batch["reward"] + added[of_row]
    if shaping.overlong_filter:
        cut = torch.tensor([episode.end in TRUNCATED for episode in of_rows])
        batch["loss_mask"] = overlong_filter(batch["loss_mask"], cut)
    if shaping.kl_in_reward:
        batch["policy_log_probs"] = engine.forward(batch)["log_probs"]
        with base_policy(engine) as reference:
            batch["ref_log_probs"] = reference.forward(batch)["log_probs"]
        if config.advantage != "reinforce_plus_plus":  # which has it token by token
            parts = ragged(batch["loss_mask"])
            kl = k1(*(flattened(ragged(batch[f"{name}_log_probs"])) for name in ("policy", "ref")))
            rows = torch.stack([x.sum() for x in torch.where(flattened(parts), kl, 0.0).split(parts.lengths)])
            cost = torch.zeros_like(reward).index_add_(0, of_row, rows.to(reward))
            batch["reward"] = batch["reward"] - shaping.kl_in_reward * cost[of_row]


def estimated(batch: TensorDict, config: GrpoConfig) -> Tensor:
    """Return the advantages of a shaped batch, jagged (B, j).

    Raises:
        ValueError: KL is in the reward of each token, and an episode has several rows.
    """
    if not config.shaping.kl_in_reward or config.advantage != "reinforce_plus_plus":
        return estimate(batch, config.advantage, config.advantage_options)
    if len(batch["episode"].unique()) < len(batch):
        raise ValueError(
            "--advantage reinforce_plus_plus with --kl-in-reward adds up the KL of the tokens of one row, and an "
            "episode here has several: take --advantage reinforce_plus_plus_baseline, whose reward has it whole"
        )
    mask, policy, reference = (batch[name] for name in ("loss_mask", "policy_log_probs", "ref_log_probs"))
    return normalized(returns_with_kl(batch["reward"], mask, policy, reference, config.shaping.kl_in_reward), mask)


def _weigh(batch: TensorDict, episodes: Sequence[AnyEpisode], config: GrpoConfig) -> None:
    """Add the reward components of each row's episode to the batch, with their weights, where they are compared apart;
    else take their weighted sum for the reward.

    Raises:
        ValueError: episodes have different components, or a weight names none.
    """
    names, components = _components(episodes)
    weights = config.shaping.component_weights
    if unknown := sorted(set(weights) - set(names)):
        raise ValueError(f"--reward-weights: there is no reward component {unknown[0]!r}, only {', '.join(names)}")
    factors = torch.tensor([weights.get(name, 1.0) for name in names])
    if config.advantage == "gdpo":
        batch[COMPONENTS], batch[WEIGHTS] = components, factors.expand_as(components).contiguous()
    else:
        batch["reward"] = components @ factors


def _turn_rewards(episodes: Sequence[AnyEpisode], loss_mask: Tensor) -> Tensor:
    """Return the rewards of the rows' turns at their last tokens, jagged f32 (B, j) (`at_turn_ends`).

    Raises:
        ValueError: no episode has any, or one has more than turns.
    """
    given = [episode.score.turn_rewards for episode in episodes if episode.score is not None]
    if not any(given):
        raise ValueError(
            "--advantage turn_grpo compares rewards of turns, and no answer has any: give them to Score(turn_rewards=)"
        )
    return at_turn_ends(given, loss_mask)


def _components(episodes: Sequence[AnyEpisode]) -> tuple[list[str], Tensor]:
    """Return the names of the reward components of scored episodes, and them, f32[B, K], in the order of the names.

    Raises:
        ValueError: there are none, or episodes have different ones.
    """
    parts = [episode.score.reward_components for episode in episodes if episode.score is not None]
    names = sorted(parts[0])
    if not names or any(sorted(part) != names for part in parts):
        other = next((part for part in parts if sorted(part) != names), parts[0])
        raise ValueError(
            "--advantage gdpo and --reward-weights read reward components, the same of every answer: there are "
            f"{', '.join(names) or 'none'} and {', '.join(sorted(other)) or 'none'}; give them to Score"
        )
    return names, torch.tensor([[float(part[name]) for name in names] for part in parts])
