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

from seqpack.batches.mrope import IMAGE, VIDEO, sequence_positions

TYPES = "mm_token_type_ids"
KINDS = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
MAX_SEEN = 64  # media that are checked once, and the most values of all their patches
MAX_VALUES = 2**26
_KEYS = frozenset([TYPES, *(key for pair in KINDS.values() for key in pair)])


@dataclass(frozen=True, eq=False)
class Media:
    """Media of a prompt: patches [P, values] and grids i64[n, 3] by kind, and the types of the prompt's tokens."""

    types: tuple[int, ...]
    patches: Mapping[int, Tensor]
    grids: Mapping[int, Tensor]
    digest: bytes

    @property
    def size(self) -> int:
        """Number of values of its patches."""
        return sum(part.numel() for part in self.patches.values())


NO_MEDIA = Media((), {}, {}, b"")


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


def text_of(model: Any) -> Any:
    """Return the text part of a module, without its head."""
    return getattr(model.model, "language_model", model.model)


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


class SeenPrompts:
    """Prompts with media for one module, whose checks are done once for equal media: a group's episodes bring such."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: dict[bytes, Media] = {}

    def prompt(self, prompt_ids: Sequence[int], media: Mapping[str, Any]) -> SeenPrompt:
        """Return `seen_prompt` of the module; what media are equal is told by their values now."""
        key = _values_digest(media)
        known = None if key is None else self._known.get(key)
        if known is not None and len(known.types) <= len(prompt_ids):
            prompt = SeenPrompt(prompt_ids)
            prompt.media = known
            return prompt
        prompt = seen_prompt(self._model, prompt_ids, media)
        if key is not None and prompt.media.size <= MAX_VALUES:
            self._known[key] = prompt.media
            while len(self._known) > 1 and (
                len(self._known) > MAX_SEEN or sum(one.size for one in tuple(self._known.values())) > MAX_VALUES
            ):
                self._known.pop(next(iter(self._known)), None)
        return prompt


def _values_digest(media: Mapping[str, Any]) -> bytes | None:
    """Return a digest of names, types, shapes and values as they are given; None where not all is on the host."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(media):
        value = media[name]
        if name == TYPES and isinstance(value, list | tuple):
            digest.update(repr((name, value)).encode())
            continue
        if not isinstance(value, Tensor) or value.device.type != "cpu" or not value.dim():
            return None
        digest.update(repr((name, value.dtype, tuple(value.shape))).encode())
        digest.update(value.detach().contiguous().view(torch.uint8).numpy().data)
    return digest.digest()


class SeenInputs(NamedTuple):
    """Inputs of packed prompts: embeddings [T, H], positions i64[3, T]; the next position of each less its length."""

    embeddings: Tensor
    positions: Tensor
    ahead: tuple[int, ...]


def seen_inputs(model: Any, prompts: Sequence[Sequence[int]]) -> SeenInputs:
    """Embed prompts, some with images, one after another."""
    embed = model.get_input_embeddings()
    device = embed.weight.device
    embeddings: Tensor = embed(torch.tensor([t for p in prompts for t in p], device=device))
    parts = [prompt.media if isinstance(prompt, SeenPrompt) else NO_MEDIA for prompt in prompts]
    types = [
        torch.tensor([*part.types, *[0] * (len(prompt) - len(part.types))])
        for prompt, part in zip(prompts, parts, strict=True)
    ]
    positions = [
        sequence_positions(own, part.grids.get(IMAGE), part.grids.get(VIDEO), _merge_size(model))
        for own, part in zip(types, parts, strict=True)
    ]
    for kind in KINDS:
        seen = [part for part in parts if len(part.grids.get(kind, ()))]
        if not seen:
            continue
        patches, grids = (
            torch.cat([of[kind] for of in ofs]).to(device)
            for ofs in ([part.patches for part in seen], [part.grids for part in seen])
        )
        features = tower_of(model)(patches, grid_thw=grids).pooler_output.to(embeddings.dtype)
        places = (torch.cat(types) == kind).nonzero().squeeze(1).to(device)
        embeddings = embeddings.index_put((places,), features)
    ahead = tuple(int(own.max()) + 1 - own.shape[1] for own in positions)
    return SeenInputs(embeddings, torch.cat(positions, dim=1).to(device), ahead)


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
