"""A batch with images and videos, checked whole before a step, and the positions of its tokens.

Media of a sample are `pixel_values` f32[patches, numbers] with `image_grid_thw` i64[images, 3], and the same of videos
(`pixel_values_videos`, `video_grid_thw`), in the order of the sample's tokens; `mm_token_type_ids` i64[tokens] says
which tokens stand for them (0 text, 1 image, 2 video).
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from engines.media.vision_settings import VisionSettings
from seqpack.batches.jagged import Ragged
from seqpack.batches.mrope import IMAGE, VIDEO, sequence_positions
from seqpack.batches.schema import MEDIA_KEYS
from seqpack.batches.view import BatchView

TYPES = "mm_token_type_ids"
KINDS = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
KEYS = (TYPES, *(key for pair in KINDS.values() for key in pair))
"""Keys of media in a batch."""


def media_keys(view: BatchView) -> list[str]:
    """Return the keys of media that a batch holds."""
    return sorted(MEDIA_KEYS.intersection(view.keys()))


def with_positions(view: BatchView, settings: VisionSettings) -> BatchView:
    """Check a batch's media, and return it with multi-axis `position_ids` (3, tokens) where it has media.

    Multi-axis positions that the batch has already are kept. ValueError names the sample whose tokens, grids and
    patches do not fit each other, or a key that is missing or unknown.
    """
    media = media_keys(view)
    if not media:
        return view
    for key in media:
        if key not in KEYS:
            raise ValueError(f"the batch has {key}, which no vision tower here reads: leave it out")
    for pair in KINDS.values():
        missing = [key for key in pair if key not in view]
        if len(missing) == 1:
            raise ValueError(f"the batch has {set(pair).difference(missing).pop()} without {missing[0]}")
    if TYPES not in view:
        raise ValueError(f"the batch has media without {TYPES}, which says what tokens stand for them")
    types, ids = view.parts(TYPES), view.parts("input_ids")
    finite = all(bool(view.flat(pixels).isfinite().all()) for pixels, _ in KINDS.values() if pixels in view)
    known: dict[tuple[object, ...], Tensor] = {}
    parts = []
    for row in range(len(view)):
        try:  # the numbers of patches matter to no check but that they are finite
            text = _read(view, row)
            if not finite or text not in known:
                known[text] = _sample(view, settings, row, _row(types, row), _row(ids, row))
            parts.append(known[text])
        except ValueError as error:
            raise ValueError(f"sample {row}: {error}") from error
    own = view.columns.get("position_ids")
    if isinstance(own, Ragged) and own.values.dim() == 2:
        return view
    starts = [0, *accumulate(view.lengths)][:-1]
    positions = Ragged(torch.cat(parts, dim=1), starts, list(view.lengths), 1)
    return replace(view, columns={**view.columns, "position_ids": positions})


def _read(view: BatchView, row: int) -> tuple[object, ...]:
    """Return what a sample's positions and checks follow from, in a batch whose patches are finite numbers."""
    keys = (TYPES, "input_ids", *(grid for _, grid in KINDS.values()))
    counts = [view.parts(pixels).lengths[row] for pixels, _ in KINDS.values() if pixels in view]
    return (*(bytes_of(_row(view.parts(key), row)) for key in keys if key in view), *counts)


def bytes_of(values: Tensor) -> bytes:
    """Return the bytes of a tensor: equal for equal shapes of equal values."""
    return values.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _sample(view: BatchView, settings: VisionSettings, row: int, types: Tensor, ids: Tensor) -> Tensor:
    """Check one sample and return its positions i64[3, tokens]."""
    grids: dict[int, Tensor | None] = {}
    for kind, (pixels, grid) in KINDS.items():
        if pixels not in view:
            grids[kind] = None
            continue
        patches, sizes = _row(view.parts(pixels), row), _row(view.parts(grid), row)
        _check_patches(pixels, grid, patches, sizes, settings)
        grids[kind] = sizes
    for kind, token in ((IMAGE, settings.image_token_id), (VIDEO, settings.video_token_id)):
        other = ids[(types == kind) & (ids != token)]
        if other.numel():
            raise ValueError(
                f"{TYPES} says {kind} of a token {int(other[0])}, but the model's token for it is {token}: the prompt "
                "was rendered for another model"
            )
    return sequence_positions(types, grids[IMAGE], grids[VIDEO], settings.merge_size)


def _check_patches(pixels: str, grid: str, patches: Tensor, sizes: Tensor, settings: VisionSettings) -> None:
    if patches.dim() != 2 or patches.shape[1] != settings.patch_numbers:
        raise ValueError(
            f"{pixels} must be (patches, {settings.patch_numbers}), got shape {tuple(patches.shape)}: the images were "
            "cut into patches for another model"
        )
    if not patches.is_floating_point() or not bool(patches.isfinite().all()):
        raise ValueError(f"{pixels} must be finite floating-point numbers, got {patches.dtype}")
    if sizes.dim() != 2 or sizes.shape[1] != 3:
        raise ValueError(f"{grid} must be (n, 3), got shape {tuple(sizes.shape)}")
    count = int(sizes.prod(-1).sum()) if sizes.numel() else 0
    if count != patches.shape[0]:
        raise ValueError(f"{pixels} has {patches.shape[0]} patches, {grid} speaks of {count}")


def _row(parts: Ragged, row: int) -> Tensor:
    return parts.values.narrow(parts.dim, parts.starts[row], parts.lengths[row])


def select_media(view: BatchView, keys: Sequence[str]) -> list[str]:
    """Return the keys that the batch has, of `keys` and the media: what scoring needs of it."""
    return [key for key in (*keys, *KEYS) if key in view]
