"""What an episode leaves behind, and how a list of them becomes a training batch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict

from rollout.environment import Message
from seqpack.batches.batch import make_batch

NOT_SAMPLED = -1  # policy version of a token that no policy made


@dataclass(frozen=True)
class Trajectory:
    """One episode, token by token: prompt, sampled turns and what the environment said between them.

    The four sequences are of one length. `loss_mask` is true on sampled tokens alone; there `log_probs` are the
    sampler's and `policy_versions` its weights, elsewhere 0.0 and -1. `messages` is the conversation for people.
    """

    ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    reward: float
    group: int
    messages: tuple[Message, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {len(self.ids), len(self.loss_mask), len(self.log_probs), len(self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"ids, loss_mask, log_probs and policy_versions differ in length: {sorted(lengths)}")
        if not self.ids or self.loss_mask[0]:
            raise ValueError("a trajectory starts with at least one token that was not sampled")


def to_batch(trajectories: Sequence[Trajectory]) -> TensorDict:
    """The training batch of B trajectories: jagged `input_ids`, `position_ids`, `loss_mask`, `rollout_log_probs`,
    `policy_version`, all (B, j) and aligned; `reward` (B,) float32 and `group` (B,) int64. ValueError when empty.
    """
    if not trajectories:
        raise ValueError("no trajectories: a batch needs at least one")
    samples = [
        {
            "input_ids": torch.tensor(t.ids, dtype=torch.int64),
            "position_ids": torch.arange(len(t.ids)),
            "loss_mask": torch.tensor(t.loss_mask, dtype=torch.bool),
            "rollout_log_probs": torch.tensor(t.log_probs, dtype=torch.float32),
            "policy_version": torch.tensor(t.policy_versions, dtype=torch.int32),
            "reward": float(t.reward),
            "group": int(t.group),
        }
        for t in trajectories
    ]
    return make_batch(samples)
