"""Multi-axis rotary positions (MRoPE) of token streams with images and videos, from their grids alone.

Every token has a time, a height and a width position (Qwen2-VL, arXiv 2409.12191, section 2.1). Strategy, token by
token from the left, with `start` the next free position:

1. A token of text has `start` on all axes, and `start` grows by one.
2. An image of a grid (t, h, w) in patches is t x (h / m) x (w / m) tokens, m patches merged along each side. Their
   positions are `start` plus their place in that grid, and `start` grows by the larger of h / m and w / m.
3. A video is written frame by frame, with text (time stamps) between: each frame is an image of its own (Qwen3-VL).

Invariants, each with a test: equal to transformers' `get_rope_index`; a stream without media has 0, 1, 2, ... on every
axis; what follows a prefix does not change the prefix.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

TEXT, IMAGE, VIDEO = 0, 1, 2
"""Of `mm_token_type_ids`, as in transformers."""


def mrope_positions(
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    merge_size: int = 2,
    attention_mask: Tensor | None = None,
    text_axis: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the positions i64[3, B, T] of a padded batch, and i64[B, 1]: the next token's position minus T.

    `mm_token_type_ids` i64[B, T] (0 text, 1 image, 2 video), grids i64[n, 3] of all rows one after another,
    `attention_mask` [B, T]: padding, on either side, has position 0. With `text_axis` a first axis is put before the
    others, i64[4, B, T]: the place of each token in its row. ValueError names the row whose tokens do not fit its
    grids, or says how many grids are left over.
    """
    if mm_token_type_ids.dim() != 2:
        raise ValueError(f"mm_token_type_ids must be (B, T), got shape {tuple(mm_token_type_ids.shape)}")
    rows, width = mm_token_type_ids.shape
    present = torch.ones_like(mm_token_type_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    pictures, frames = _grids("image_grid_thw", image_grid_thw), _frames(video_grid_thw)
    positions = torch.zeros((3, rows, width), dtype=torch.int64)
    places = (present.cumsum(1) - 1).masked_fill(~present, 0).to("cpu", torch.int64)
    deltas = []
    types, mask = mm_token_type_ids.cpu(), present.cpu()
    for row in range(rows):
        one, pictures, frames = _sequence(types[row][mask[row]], pictures, frames, merge_size, f"row {row}")
        positions[:, row, mask[row]] = one
        deltas.append(int(one.max()) + 1 - one.shape[1] if one.numel() else 0)
    _refuse_rest(pictures, frames)
    if text_axis:
        positions = torch.cat([places[None], positions])
    device = mm_token_type_ids.device
    return positions.to(device), torch.tensor(deltas, dtype=torch.int64, device=device)[:, None]


def sequence_positions(
    mm_token_type_ids: Tensor,
    image_grid_thw: Tensor | None = None,
    video_grid_thw: Tensor | None = None,
    merge_size: int = 2,
) -> Tensor:
    """Return the positions i64[3, T] of one sequence of types i64[T]; ValueError as for `mrope_positions`."""
    pictures, frames = _grids("image_grid_thw", image_grid_thw), _frames(video_grid_thw)
    positions, pictures, frames = _sequence(mm_token_type_ids.cpu(), pictures, frames, merge_size, "the sequence")
    _refuse_rest(pictures, frames)
    return positions.to(mm_token_type_ids.device)


def grid_tokens(grid_thw: Sequence[int], merge_size: int) -> int:
    """Return the tokens of a grid (t, h, w) of patches; ValueError where h or w is no multiple of `merge_size`."""
    time, height, width = grid_thw
    if min(grid_thw) < 1 or height % merge_size or width % merge_size:
        raise ValueError(
            f"the grid {tuple(grid_thw)} (time, height, width) must be positive, and its height and width multiples "
            f"of {merge_size}, the patches that are merged along each side"
        )
    return time * (height // merge_size) * (width // merge_size)


_Grids = list[tuple[int, int, int]]


def _grids(name: str, grids: Tensor | None) -> _Grids:
    if grids is None:
        return []
    if grids.dim() != 2 or grids.shape[1] != 3:
        raise ValueError(f"{name} must be (n, 3): time, height, width in patches; got shape {tuple(grids.shape)}")
    return [(t, h, w) for t, h, w in grids.tolist()]


def _frames(grids: Tensor | None) -> _Grids:
    return [(1, h, w) for t, h, w in _grids("video_grid_thw", grids) for _ in range(t)]


def _sequence(types: Tensor, pictures: _Grids, frames: _Grids, merge: int, where: str) -> tuple[Tensor, _Grids, _Grids]:
    """Return (positions i64[3, T], the pictures and frames that are left)."""
    left = {IMAGE: list(pictures), VIDEO: list(frames)}
    parts, start = [torch.empty((3, 0), dtype=torch.int64)], 0
    for kind, run in groupby(types.tolist()):
        count = sum(1 for _ in run)
        if kind == TEXT:
            parts.append(torch.arange(start, start + count).expand(3, -1))
            start += count
            continue
        if kind not in left:
            raise ValueError(f"{where} has tokens of type {kind}: only 0 (text), 1 (image) and 2 (video) are known")
        while count:
            name = "image" if kind == IMAGE else "video"
            if not left[kind]:
                raise ValueError(f"{where} has {count} tokens of type {kind} more than its {name} grids account for")
            grid = left[kind].pop(0)
            size = grid_tokens(grid, merge)
            if size > count:
                raise ValueError(
                    f"{where} has a run of {count} {name} tokens where the grid {grid} makes {size}: the prompt was "
                    "cut off inside of it, or its placeholders were counted in another way"
                )
            parts.append(_grid_positions(grid, merge) + start)
            start += max(grid[1], grid[2]) // merge
            count -= size
    return torch.cat(parts, dim=1), left[IMAGE], left[VIDEO]


def _grid_positions(grid: tuple[int, int, int], merge: int) -> Tensor:
    axes = [torch.arange(size) for size in (grid[0], grid[1] // merge, grid[2] // merge)]
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).reshape(3, -1)


def _refuse_rest(pictures: _Grids, frames: _Grids) -> None:
    for name, rest in (("image", pictures), ("video", frames)):
        if rest:
            raise ValueError(
                f"{len(rest)} {name} grids are left over, the first {rest[0]}: mm_token_type_ids has no tokens for them"
            )
