"""Settings of a vision tower's inputs: sizes of patches, and the tokens that stand for media."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VisionSettings:
    """Settings of one vision-language model; made by `of`."""

    patch_numbers: int
    """Number of values of a patch: channels x frames x height x width."""
    merge_size: int
    """Number of patches, along each side, that are merged into a token."""
    image_token_id: int
    video_token_id: int

    @staticmethod
    def of(config: Any) -> "VisionSettings":
        """Read them from a transformers config. ValueError for a config without a vision tower."""
        vision = getattr(config, "vision_config", None)
        if vision is None:
            raise ValueError(
                f"a model of type {config.model_type!r} has no vision tower: leave vision at 'off', or give a "
                "vision-language model"
            )
        size = [*_sides(vision.temporal_patch_size, 1), *_sides(vision.patch_size, 2)]
        return VisionSettings(
            vision.in_channels * math.prod(size),
            vision.spatial_merge_size,
            config.image_token_id,
            config.video_token_id,
        )


def _sides(size: int | Iterable[int], count: int) -> list[int]:
    return [size] * count if isinstance(size, int) else list(size)
