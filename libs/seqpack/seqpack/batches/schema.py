"""The keys of a batch, their types and their meaning. Every per-token key is aligned to `input_ids`, never shifted.

Entry t belongs to token t, conditioned on tokens < t. A sequence's first token is never trained.
"""

import torch

TOKEN_KEYS: dict[str, torch.dtype] = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,  # (B, j), or one row per axis: (B, 3, j) and (B, 4, j)
    "loss_mask": torch.bool,
    "loss_weights": torch.float32,  # what the loss of a trained token is multiplied by, in supervised training
    "rollout_log_probs": torch.float32,
    "old_log_probs": torch.float32,
    "ref_log_probs": torch.float32,
    "log_probs": torch.float32,
    "entropy": torch.float32,
    "advantages": torch.float32,
    "policy_version": torch.int32,
    "mm_token_type_ids": torch.int64,
}
"""Jagged along the last dimension, one value a token."""

ROUTED_EXPERTS = "routed_experts"
"""int16 (B, j, layers, k), jagged along a sample's first dimension: the experts that a token went to in the sampler,
by routed layer in the order of the model; -1 in all of a token's entries where that is not known."""

SEVERAL = ("several_tokens", "several_log_probs", "several_rest")
"""int64 (B, K, j) distinct tokens at the place of each (-1: none), float32 (B, K, j) their log-probs (0 where none),
and float32 (B, j) the log-prob of all others together: what an engine scores where it is asked for several."""

SAMPLE_KEYS: dict[str, torch.dtype] = {
    "reward": torch.float32,
    "group": torch.int64,
    "episode": torch.int64,
    "episode_tokens": torch.int64,
}
"""Dense, one value a sample. Samples of one `episode` share its reward, its group and the number of its trained tokens;
a group, and a mean over answers, counts it once."""

MEDIA_KEYS = frozenset(
    {
        "pixel_values",
        "image_grid_thw",
        "pixel_values_videos",
        "video_grid_thw",
        "input_features",
        "feature_attention_mask",
    }
)
"""Jagged along a sample's first dimension, with lengths of their own."""
