"""The episodes of a step that the report shows."""

import random
from typing import Any

from transformers import PreTrainedTokenizerBase

from apps.grpo.step import StepResult


def kept_episodes(
    result: StepResult, step: int, count: int, tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """At most `count` episodes from all over the step's batch, those with an advantage first; see `runlog.episodes`."""
    shuffled = random.Random(step).sample(range(len(result.trajectories)), len(result.trajectories))
    order = sorted(shuffled, key=lambda i: result.advantages[i] == 0)
    return [
        {
            "step": step,
            "tokens": [tokenizer.decode([token]) for token in result.trajectories[i].ids],
            "mask": list(result.trajectories[i].loss_mask),
            "advantage": result.advantages[i],
            "log_probs": list(result.trajectories[i].log_probs),
            "versions": list(result.trajectories[i].policy_versions),
            "reward": result.trajectories[i].reward,
            "group": result.trajectories[i].group,
            "messages": [dict(message) for message in result.trajectories[i].messages],
            "metadata": dict(result.trajectories[i].metadata),
        }
        for i in order[:count]
    ]
