"""Trajectories as a batch: aligned and masked."""

import pytest
import torch

from rollout.trajectory import Trajectory, to_batch

ONE = Trajectory((5, 6, 7, 8), (False, True, False, True), (0.0, -0.5, 0.0, -2.0), (-1, 3, -1, 4), 1.0, 2)
TWO = Trajectory((9, 4), (False, True), (0.0, -1.0), (-1, 4), 0.25, 7)


def test_a_batch_is_aligned_to_the_tokens():
    batch = to_batch([ONE, TWO])
    assert batch.batch_size == torch.Size([2])
    rows = {key: [row.tolist() for row in batch[key].unbind()] for key in (
        "input_ids", "position_ids", "loss_mask", "rollout_log_probs", "policy_version")}  # fmt: skip
    assert rows["input_ids"] == [[5, 6, 7, 8], [9, 4]]
    assert rows["position_ids"] == [[0, 1, 2, 3], [0, 1]]
    assert rows["loss_mask"] == [[False, True, False, True], [False, True]]
    assert rows["rollout_log_probs"] == [[0.0, -0.5, 0.0, -2.0], [0.0, -1.0]]
    assert rows["policy_version"] == [[-1, 3, -1, 4], [-1, 4]]
    assert batch["reward"].tolist() == [1.0, 0.25]
    assert batch["group"].tolist() == [2, 7]
    dtypes = {
        k: batch[k].dtype for k in ("input_ids", "loss_mask", "rollout_log_probs", "policy_version", "reward", "group")
    }
    assert list(dtypes.values()) == [torch.int64, torch.bool, torch.float32, torch.int32, torch.float32, torch.int64]


def test_wrong_trajectories_are_refused():
    with pytest.raises(ValueError, match="differ in length"):
        Trajectory((1, 2), (False,), (0.0, 0.0), (-1, -1), 0.0, 0)
    with pytest.raises(ValueError, match="not sampled"):
        Trajectory((1,), (True,), (0.0,), (0,), 0.0, 0)
    with pytest.raises(ValueError, match="at least one"):
        to_batch([])
