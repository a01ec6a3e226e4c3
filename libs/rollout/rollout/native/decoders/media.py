"""Prompts with images: their identity, and how a vision-language module of transformers reads them.

A `SeenPrompt` is the tokens of a prompt together with its media. It is equal to another only where both the tokens and
the images are, so that a cache by tokens (of prompts that come again) never confuses two pictures. States of prompts
with images are not kept in the prefix cache: prompts that continue them are read again.

The module's own forward pass is given embeddings in which the tower's features replace those of the image tokens, and
the positions of `seqpack.batches.mrope`, which are those of the trainer. A sampled token that happens to be the image
token is text: the prompt's token types say what is an image.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from seqpack.batches.mrope import IMAGE, VIDEO, mrope_positions, sequence_positions

TYPES = "mm_token_type_ids"
KINDS = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
_KEYS = frozenset([TYPES, *(key for pair in KINDS.values() for key in pair)])


@dataclass(frozen=True, eq=False)
class Media:
    """Media of a prompt: patches [P, values] and grids i64[n, 3] by kind, and the types of the prompt's tokens."""

    types: tuple[int, ...]
    patches: Mapping[int, Tensor]
    grids: Mapping[int, Tensor]
    digest: bytes


class SeenPrompt(tuple[int, ...]):
    """A prompt's tokens with its media; made by `seen_prompt`."""

    media: Media

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenPrompt) and self.media.digest == other.media.digest and super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((self.media.digest, tuple(self)))


def shown(prompt: Sequence[int]) -> bytes:
    """Return a digest of a prompt's media; empty for text."""
    return prompt.media.digest if isinstance(prompt, SeenPrompt) else b""


def followed(prompt: tuple[int, ...], ids: Iterable[int]) -> tuple[int, ...]:
    """Return a prompt with tokens of text appended, and the same images."""
    if not isinstance(prompt, SeenPrompt):
        return (*prompt, *ids)
    longer = SeenPrompt((*prompt, *ids))
    longer.media = prompt.media
    return longer


def tower_of(model: Any) -> Any:
    """Return the vision tower of a module; None where it has none."""
    return getattr(getattr(model, "model", None), "visual", None)


def seen_prompt(model: Any, prompt_ids: Sequence[int], media: Mapping[str, Any]) -> SeenPrompt:
    """Check the media of a prompt, and join them with its tokens.

    `media`: `pixel_values` f32[patches, values] with `image_grid_thw` i64[n, 3], the same of videos, and
    `mm_token_type_ids`, one for each token or for the first of them (text follows). Raises ValueError for a module
    without a vision tower, and for media that do not fit the prompt or the module.
    """
    if tower_of(model) is None:
        raise ValueError(f"{type(model).__name__} has no vision tower: it samples from text alone, leave media out")
    prompt = SeenPrompt(prompt_ids)
    numbers = model.model.visual.patch_embed.proj.weight[0].numel()
    prompt.media = checked_media(len(prompt_ids), media, numbers, _merge_size(model))
    return prompt


def checked_media(length: int, media: Mapping[str, Any], numbers: int, merge_size: int) -> Media:
    """Return the media of a prompt of `length` tokens, or raise ValueError as `seen_prompt` does. The tower's patches
    have `numbers` values and are merged by `merge_size` along each side."""
    unknown = sorted(set(media) - _KEYS)
    if unknown or TYPES not in media:
        raise ValueError(f"media are {', '.join(sorted(_KEYS))}, got {', '.join(sorted(media)) or 'nothing'}")
    types = torch.as_tensor(media[TYPES], dtype=torch.int64)
    if types.dim() != 1 or len(types) > length:
        raise ValueError(f"{TYPES} has shape {tuple(types.shape)} for a prompt of {length} tokens")
    patches, grids = {}, {}
    for kind, (pixels, grid) in KINDS.items():
        if (pixels in media) != (grid in media):
            raise ValueError(f"media hold one of {pixels} and {grid}: they come together")
        if pixels in media:
            patches[kind] = torch.as_tensor(media[pixels])
            grids[kind] = torch.as_tensor(media[grid], dtype=torch.int64)
            _check_patches(pixels, patches[kind], grids[kind], numbers)
    sequence_positions(types, grids.get(IMAGE), grids.get(VIDEO), merge_size)
    return Media(tuple(types.tolist()), patches, grids, _digest(types, patches, grids))


class SeenInputs(NamedTuple):
    """Inputs of a padded batch: embeddings [n, L, H], positions i64[3, n, L], and the next step's offset i64[n, 1]."""

    embeddings: Tensor
    positions: Tensor
    ahead: Tensor


def seen_inputs(model: Any, ids: Tensor, mask: Tensor, prompts: Sequence[Sequence[int]]) -> SeenInputs:
    """Embed prompts, some with images, that are padded on the left in ids i64[n, L]; mask bool[n, L]."""
    types = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        if isinstance(prompt, SeenPrompt):
            begin = ids.shape[1] - len(prompt)
            own = torch.tensor(prompt.media.types, device=ids.device)
            types[row, begin : begin + len(own)] = own
    embeddings: Tensor = model.get_input_embeddings()(ids)
    flat, grids = embeddings.flatten(0, 1), {}
    for kind in KINDS:
        parts = [p.media for p in prompts if isinstance(p, SeenPrompt) and len(p.media.grids.get(kind, ()))]
        if not parts:
            continue
        grids[kind] = torch.cat([part.grids[kind] for part in parts]).to(ids.device)
        patches = torch.cat([part.patches[kind] for part in parts]).to(ids.device)
        features = tower_of(model)(patches, grid_thw=grids[kind]).pooler_output.to(embeddings.dtype)
        flat = flat.index_put(((types == kind).flatten().nonzero().squeeze(1),), features)
    positions, ahead = mrope_positions(types, grids.get(IMAGE), grids.get(VIDEO), _merge_size(model), mask)
    return SeenInputs(flat.view(embeddings.shape), positions, ahead)


def _merge_size(model: nn.Module) -> int:
    config: Any = model.config
    return int(config.vision_config.spatial_merge_size)


def _check_patches(name: str, patches: Tensor, grids: Tensor, numbers: int) -> None:
    if patches.dim() != 2 or patches.shape[1] != numbers or not patches.is_floating_point():
        raise ValueError(
            f"{name} must be floating-point numbers (patches, {numbers}), got {patches.dtype} of shape "
            f"{tuple(patches.shape)}: the images were cut into patches for another model"
        )
    if grids.dim() != 2 or grids.shape[1] != 3 or int(grids.prod(-1).sum()) != len(patches):
        raise ValueError(f"{name} has {len(patches)} patches, which is not what the grids {grids.tolist()} speak of")
    if not bool(patches.isfinite().all()):
        raise ValueError(f"{name} holds numbers that are not finite")


def _digest(types: Tensor, patches: Mapping[int, Tensor], grids: Mapping[int, Tensor]) -> bytes:
    digest = hashlib.blake2b(types.numpy().tobytes(), digest_size=16)
    for kind in sorted(patches):
        for part in (grids[kind], patches[kind].float()):
            digest.update(repr((kind, tuple(part.shape))).encode())
            digest.update(part.cpu().contiguous().numpy().tobytes())
    return digest.digest()
