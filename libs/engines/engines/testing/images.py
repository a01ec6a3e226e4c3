"""Random samples with images and videos for the tiny vision-language model of `engines.tiny`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engines.media.vision_settings import VisionSettings
from seqpack.batches.mrope import IMAGE, VIDEO, grid_tokens

Grid = tuple[int, int, int]


def media_sample(
    settings: VisionSettings,
    texts: Sequence[int],
    images: Sequence[Grid] = (),
    videos: Sequence[Grid] = (),
    seed: int = 0,
    vocab: int = 40,
) -> dict[str, Any]:
    """Return a sample of text stretches of these lengths, between them its images and then the frames of its videos.

    There is one more stretch than images and frames. The last one is trained.
    """
    rng = torch.Generator().manual_seed(seed)
    frames = [(1, h, w) for t, h, w in videos for _ in range(t)]
    runs = [(IMAGE, settings.image_token_id, g) for g in images] + [(VIDEO, settings.video_token_id, g) for g in frames]
    if len(texts) != len(runs) + 1:
        raise ValueError(f"{len(runs)} images and frames stand between {len(runs) + 1} texts, got {len(texts)}")
    ids, types = [torch.randint(2, vocab, (texts[0],), generator=rng)], [0] * texts[0]
    for (kind, token, grid), text in zip(runs, texts[1:], strict=True):
        count = grid_tokens(grid, settings.merge_size)
        ids += [torch.full((count,), token), torch.randint(2, vocab, (text,), generator=rng)]
        types += [kind] * count + [0] * text
    length, trained = len(types), max(1, len(types) - texts[-1])
    mask = torch.arange(length) >= trained
    sample = {
        "input_ids": torch.cat(ids),
        "mm_token_type_ids": torch.tensor(types),
        "loss_mask": mask,
        "advantages": torch.randn(1, generator=rng) * mask,
        "rollout_log_probs": -4 * torch.rand(length, generator=rng) * mask,
        "group": seed // 2,
    }
    for pixels, name, grids in (("pixel_values", "image", images), ("pixel_values_videos", "video", videos)):
        count = sum(t * h * w for t, h, w in grids)
        sample[pixels] = torch.randn(count, settings.patch_numbers, generator=rng)
        sample[f"{name}_grid_thw"] = torch.tensor(list(grids), dtype=torch.int64).view(-1, 3)
    return sample


def model_arguments(sample: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a single sample as the arguments of a transformers model."""
    arguments = {key: sample[key][None] for key in ("input_ids", "mm_token_type_ids")}
    for pixels, grid in (("pixel_values", "image_grid_thw"), ("pixel_values_videos", "video_grid_thw")):
        if len(sample[grid]):
            arguments |= {pixels: sample[pixels], grid: sample[grid]}
    return arguments
