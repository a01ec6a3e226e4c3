"""Images of a prompt for vLLM: patches and grids as the trainer has them, and the places of their tokens.

vLLM gets tokens, patches and places, and cuts no picture and no text of its own. What both sides count for
themselves (the tokens of a grid, the numbers of a patch, the image token, every token's rotary position) is compared:
by `VisionSpec` when vLLM has started, by the digest of the positions at every prompt.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout.native.decoders.media import KINDS, checked_media
from rollout.vllm.client.position_digest import digest_of
from seqpack.batches.mrope import IMAGE, VIDEO, grid_tokens, sequence_positions

VISION_MODELS = ("qwen3_5", "qwen3_5_moe")
"""Model types whose images are tested with vLLM."""


@dataclass(frozen=True)
class VisionSpec:
    """The vision settings of a model, by its config.json."""

    token: int
    """Id of the image token."""
    numbers: int
    """Number of values in a patch."""
    merge_size: int
    """Number of patches that become one token, along each side."""

    def plain(self) -> dict[str, int]:
        """Return the fields for a message."""
        return {"token": self.token, "numbers": self.numbers, "merge_size": self.merge_size}


@dataclass(frozen=True)
class Image:
    """One image: its name by its contents, grid (time, height, width in patches) and patches f32[P, values]."""

    name: str
    grid: tuple[int, int, int]
    patches: Tensor


@dataclass(frozen=True)
class Shown:
    """The images of a prompt, the place of each one's first token, and the digest of all tokens' positions."""

    images: tuple[Image, ...]
    places: tuple[int, ...]
    positions: str


def vision_spec_of(model: Path) -> VisionSpec | None:
    """Return the vision settings of a model directory; None where no test has shown that vLLM's agree."""
    config = json.loads((model / "config.json").read_text())
    tower = config.get("vision_config")
    if config.get("model_type") not in VISION_MODELS or tower is None:
        return None
    numbers = tower.get("in_channels", 3) * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    return VisionSpec(config["image_token_id"], numbers, tower["spatial_merge_size"])


def shown_in(vision_spec: VisionSpec | None, prompt_ids: Sequence[int], media: Mapping[str, Any]) -> Shown:
    """Check the media of a prompt; `media` as for `RolloutEngine.generate`.

    Raises:
        ValueError: the model has no vision, the media do not fit it or the prompt, or hold a video.
    """
    if vision_spec is None:
        raise ValueError(
            f"vLLM's model sees nothing here: {', '.join(VISION_MODELS)} with a vision tower do; leave media out"
        )
    checked = checked_media(len(prompt_ids), media, vision_spec.numbers, vision_spec.merge_size)
    if VIDEO in checked.grids:
        raise ValueError(f"{KINDS[VIDEO][0]} can't be sampled from: no test has run videos through vLLM")
    grids = checked.grids.get(IMAGE, torch.empty((0, 3), dtype=torch.int64))
    types = torch.zeros(len(prompt_ids), dtype=torch.int64)
    types[: len(checked.types)] = torch.tensor(checked.types)
    places = _places(types, grids, vision_spec.merge_size)
    for place, grid in zip(places, grids.tolist(), strict=True):
        _check_tokens(prompt_ids, place, grid, vision_spec)
    patches = checked.patches[IMAGE].float().cpu().split(grids.prod(-1).tolist()) if len(grids) else ()
    images = [_image(grid, part.contiguous()) for grid, part in zip(grids.tolist(), patches, strict=True)]
    return Shown(
        tuple(images), tuple(places), digest_of(sequence_positions(types, grids, None, vision_spec.merge_size))
    )


def _places(types: Tensor, grids: Tensor, merge_size: int) -> list[int]:
    """Return the place of each image's first token; images may be side by side."""
    marked = (types == IMAGE).nonzero()[:, 0].tolist()
    places, used = [], 0
    for grid in grids.tolist():
        places.append(marked[used])
        used += grid_tokens(grid, merge_size)
    return places


def _check_tokens(prompt_ids: Sequence[int], place: int, grid: Sequence[int], vision_spec: VisionSpec) -> None:
    if grid[0] != 1:
        raise ValueError(f"the image at token {place} has the grid {tuple(grid)}: vLLM takes images of one frame")
    for at in range(place, place + grid_tokens(grid, vision_spec.merge_size)):
        if prompt_ids[at] != vision_spec.token:
            raise ValueError(
                f"token {at} of the prompt is {prompt_ids[at]}, where its image has tokens {vision_spec.token}"
            )


def _image(grid: Sequence[int], patches: Tensor) -> Image:
    time, height, width = grid
    digest = hashlib.blake2b(repr((tuple(grid), tuple(patches.shape))).encode(), digest_size=16)
    digest.update(patches.numpy().tobytes())
    return Image(digest.hexdigest(), (time, height, width), patches)
