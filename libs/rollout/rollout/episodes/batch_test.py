"""Episodes as a batch: a row a segment, aligned and masked."""

import pytest
import torch

from rollout.chat.images import expanded, images_of, without_image_parts, without_images
from rollout.chat.segment import Segment
from rollout.environments.environment import Score
from rollout.episodes.batch import to_batch
from rollout.episodes.episode import Episode, failures

ONE = Segment((5, 6, 7, 8), (False, True, False, True), (0.0, -0.5, 0.0, -2.0), (-1, 3, -1, 4))
TWO = Segment((9, 4), (False, True), (0.0, -1.0), (-1, 4))


def episode(reward: float, group: int = 0, segments: tuple[Segment, ...] = (TWO,), error: str | None = None) -> Episode:
    score = None if error else Score(reward)
    return Episode("t/0/0", "t", 0, segments, score, "failed" if error else "done", error=error, group=group)


def test_a_batch_is_aligned_to_the_tokens() -> None:
    batch = to_batch([episode(1.0, 2, (ONE,)), episode(0.25, 7)])
    assert batch.batch_size == torch.Size([2])
    rows = {key: [row.tolist() for row in batch[key].unbind()] for key in (
        "input_ids", "position_ids", "loss_mask", "rollout_log_probs", "policy_version")}  # fmt: skip
    assert rows["input_ids"] == [[5, 6, 7, 8], [9, 4]]
    assert (batch["rollout_log_probs"] * batch["loss_mask"]).values().tolist() == [0.0, -0.5, 0.0, -2.0, 0.0, -1.0]
    assert rows["position_ids"] == [[0, 1, 2, 3], [0, 1]]
    assert rows["loss_mask"] == [[False, True, False, True], [False, True]]
    assert rows["rollout_log_probs"] == [[0.0, -0.5, 0.0, -2.0], [0.0, -1.0]]
    assert rows["policy_version"] == [[-1, 3, -1, 4], [-1, 4]]
    assert batch["reward"].tolist() == [1.0, 0.25]
    assert batch["group"].tolist() == [2, 7]
    assert batch["episode"].tolist() == [0, 1]
    dtypes = {
        k: batch[k].dtype for k in ("input_ids", "loss_mask", "rollout_log_probs", "policy_version", "reward", "group")
    }
    assert list(dtypes.values()) == [torch.int64, torch.bool, torch.float32, torch.int32, torch.float32, torch.int64]


def test_a_segment_a_row_and_failed_episodes_are_left_out() -> None:
    given = [episode(1.0, segments=(ONE, TWO)), episode(0, error="lost"), episode(0.5, segments=(TWO,))]
    batch = to_batch(given)
    assert batch["episode"].tolist() == [0, 0, 2]
    assert batch["episode_tokens"].tolist() == [3, 3, 1]
    assert batch["reward"].tolist() == [1.0, 1.0, 0.5]
    assert failures([*given, *given]) == {"lost": 2}
    with pytest.raises(ValueError, match="none of 1 episodes can be trained on, the first for: lost"):
        to_batch([given[1]])


def test_wrong_segments_and_episodes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Segment((1, 2), (False,), (0.0, 0.0), (-1, -1))
    with pytest.raises(ValueError, match="not sampled"):
        Segment((1,), (True,), (0.0,), (0,))
    with pytest.raises(ValueError, match="token 1 has policy version -1, but its loss_mask is True"):
        Segment((1, 2), (False, True), (0.0, -1.0), (-1, -1))
    with pytest.raises(ValueError, match="at least one"):
        to_batch([])
    with pytest.raises(ValueError, match="has a score, or it failed"):
        Episode("t/0/0", "t", 0, (), None, "done")
    with pytest.raises(ValueError, match="failed and has no reward: lost"):
        _ = episode(0, error="lost").reward


def test_images_are_part_of_every_row() -> None:
    shows = {
        "pixel_values": torch.ones(8, 6),
        "image_grid_thw": torch.tensor([[1, 2, 4]]),
        "mm_token_type_ids": [0, 1, 1],
    }
    seen = Segment((9, 4, 4, 7), (False,) * 3 + (True,), (0.0, 0.0, 0.0, -1.0), (-1, -1, -1, 4), media=shows)
    text = Segment((9, 4), (False, True), (0.0, -1.0), (-1, 4))
    batch = to_batch([episode(1.0, segments=(text,)), episode(0.0, segments=(seen,))])
    assert [len(row) for row in batch["pixel_values"].unbind()] == [0, 8]
    assert [row.tolist() for row in batch["image_grid_thw"].unbind()] == [[], [[1, 2, 4]]]
    assert [row.tolist() for row in batch["mm_token_type_ids"].unbind()] == [[0, 0], [0, 1, 1, 0]]
    assert "pixel_values" not in to_batch([episode(1.0, segments=(text,))])


def test_images_of_messages_become_tokens() -> None:
    said = [{"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "which?"}]}]
    assert images_of(said) == ["a.png"]
    (bare,) = without_images(said)
    assert bare["content"] == [{"type": "image"}, {"type": "text", "text": "which?"}]
    assert without_image_parts(bare)["content"] == [{"type": "text", "text": "which?"}]
    media = torch.zeros(12, 6), torch.tensor([[1, 2, 4], [1, 2, 2]])
    opened = expanded([5, 9, 6, 9], 9, media, merge_size=2)
    assert opened.ids == [5, 9, 9, 6, 9]
    assert opened.media is not None
    assert opened.media["mm_token_type_ids"] == [0, 1, 1, 0, 1]
    with pytest.raises(ValueError, match="writes 1 image tokens for 2 images"):
        expanded([5, 9], 9, media, merge_size=2)
    with pytest.raises(ValueError, match=r"message 0 \(user\) has an image part without its 'image'"):
        images_of([{"role": "user", "content": [{"type": "image"}]}])
