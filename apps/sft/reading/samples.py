"""Rows as training samples: token ids, and a mask of the trained ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from apps.sft.reading.trained import Trained, mask_and_weights
from chat_tools import Rendered, Renderer, images, read_stop_tokens, with_end
from rollout.chat.images import ImageProcessor, images_of, without_images
from seqpack.batches.batch import make_batch
from seqpack.batches.mrope import grid_tokens

Sample = Mapping[str, Any]


class ImageError(ValueError):
    """An image of a conversation that can't be read; the text names it."""


class UnverifiedMaskError(ValueError):
    """A conversation whose assistant's tokens can't be proven; the text says why."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids and a mask of the trained ones, one entry a token each; the first token is never trained.

    `types`: which tokens stand for images (1), one entry a token; `images`: their paths or `data:` URIs in order. Both
    are empty for a conversation without. `weights`: of the tokens, 0 where untrained; empty where all others are 1.
    """

    ids: Sequence[int]
    mask: Sequence[bool]
    types: Sequence[int] = ()
    images: Sequence[str] = ()
    weights: Sequence[float] = ()


def encode_messages(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    trained: Trained | None = None,
    image_processor: ImageProcessor | None = None,
    *,
    reasoning: tuple[float, str | None] = (1.0, None),
    end_of_turn: str | None = None,
) -> Encoded:
    """Render one conversation by the tokenizer's own chat template.

    The renderer's stop tokens are those that stop the model (`stop_tokens_of`), which a turn may end with and is
    trained to; without them, those that the tokenizer and the template tell of. `trained`: what is trained, by default
    all that the assistant wrote. `image_processor` reads the headers of its images, where it may have some.

    Raises:
        ImageError: an image is none.
        UnverifiedMaskError: the mask can't be trusted, or the ids are not those of `apply_chat_template`.
        ValueError, jinja2.TemplateError: the template refuses the messages.
    """
    images = images_of(messages) if image_processor is not None else []
    if image_processor is not None and images:
        rendered = _rendered(renderer, messages, tools, image_processor, _grids(image_processor, images))
    else:
        rendered = renderer(messages, tools)
    if rendered.problems:
        raise UnverifiedMaskError(rendered.problems[0])
    if end_of_turn is not None:
        rendered = with_end(rendered, end_of_turn)
    mask, weights = mask_and_weights(renderer.tokenizer, rendered, trained, *reasoning)
    return Encoded(rendered.ids, mask, rendered.mm_token_type_ids if images else (), images, weights)


def encode_text(tokenizer: PreTrainedTokenizerBase, prompt: str, text: str, everything: bool = False) -> Encoded:
    """Tokenise a prompt and the text after it; every token of the text is trained, and an end of sequence after it.

    With `everything` the prompt is trained too.

    Where both together begin with the tokens of the prompt they are tokenised together. Elsewhere a token would reach
    over the border, and they are tokenised apart: in use, too, the model reads the prompt's own tokens. Special tokens
    that the tokenizer puts before a text are put before the prompt. A prompt keeps its own end of sequence; one at the
    end of the text is not written twice.

    Raises:
        ValueError: the tokenizer has no end of sequence.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise ValueError("the tokenizer names no end-of-sequence token; set eos_token in tokenizer_config.json")
    head, whole = (_without_added_end(tokenizer, part, end) for part in (prompt, prompt + text))
    if whole[: len(head)] != head:
        whole = [*head, *tokenizer(text, add_special_tokens=False)["input_ids"]]
    ids = whole if len(whole) > len(head) and whole[-1] == end else [*whole, end]
    first = 1 if everything else max(1, len(head))
    return Encoded(ids, [first <= i for i in range(len(ids))])


def sample_of(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None = None,
    image_processor: ImageProcessor | None = None,
) -> Sample:
    """Return one conversation as a sample; see `encode_messages`. `image_processor` reads its images."""
    if image_processor is not None:
        return _seen_sample(renderer, messages, tools, image_processor)
    encoded = encode_messages(renderer, messages, tools)
    return as_sample(encoded.ids, encoded.mask)


def _seen_sample(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    image_processor: ImageProcessor,
) -> Sample:
    """Return a sample of a model that sees; samples of text alone have the keys of images too."""
    media = _read(image_processor, images_of(messages))
    rendered = _rendered(renderer, messages, tools, image_processor, media[1])
    if rendered.problems:
        raise UnverifiedMaskError(rendered.problems[0])
    return {**as_sample(rendered.ids, rendered.assistant_mask), **_media_entries(rendered.mm_token_type_ids, media)}


def media_of(types: Sequence[int], images: Sequence[str], image_processor: ImageProcessor) -> dict[str, Tensor]:
    """Return the images of a sample as a batch's entries; nothing for a sample of text. `types`: one entry a token.

    Raises:
        ImageError: an image can't be read.
        ValueError: the images have other numbers of tokens than `types` says.
    """
    media = _read(image_processor, images)
    tokens = sum(grid_tokens(grid, image_processor.merge_size) for grid in media[1].tolist())
    if tokens != sum(types):
        raise ValueError(f"its images have {tokens} tokens, they had {sum(types)}: a file of them has changed")
    return _media_entries(types, media)


def _media_entries(types: Sequence[int], media: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    named = zip(("pixel_values", "image_grid_thw"), media, strict=True)
    return {"mm_token_type_ids": torch.tensor(types, dtype=torch.int64), **dict(named)}


def _read(image_processor: ImageProcessor, images: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Return patches f32[P, numbers] and grids i64[n, 3]."""
    if not images:
        return torch.empty(0, image_processor.numbers), torch.empty(0, 3, dtype=torch.int64)
    try:
        return image_processor.read(images)
    except ValueError as error:
        raise ImageError(str(error)) from error


def _grids(image_processor: ImageProcessor, images: Sequence[Any]) -> Tensor:
    """Return the grids of images from their headers."""
    try:
        return image_processor.grids(images)
    except ValueError as error:
        raise ImageError(str(error)) from error


def _rendered(
    renderer: Renderer,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
    image_processor: ImageProcessor,
    grids: Tensor,
) -> Rendered:
    counts = [grid_tokens(grid, image_processor.merge_size) for grid in grids.tolist()]
    return renderer(without_images(messages), tools, media=[images(counts, image_processor.token)])


def _without_added_end(tokenizer: PreTrainedTokenizerBase, text: str, end: int) -> list[int]:
    """Return the ids of a text without the end of sequence that some tokenizers put after every one."""
    ids = list(tokenizer(text)["input_ids"])
    if ids and ids[-1] == end and tokenizer("a")["input_ids"][-1] == end:  # "" would not tell a beginning from an end
        ids.pop()
    return ids


def stop_tokens_of(directory: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...] | None:
    """Return the tokens that generation_config.json of a model directory names as its ends; None where it names none.

    Raises:
        ValueError: they are not the tokenizer's.
    """
    try:
        return read_stop_tokens(directory, tokenizer) or None
    except ValueError as error:
        raise ValueError(f"{directory / 'generation_config.json'}, eos_token_id: {error}") from error


def as_sample(ids: Sequence[int], mask: Sequence[bool]) -> Sample:
    """Return token ids and their mask as the batch's per-token entries."""
    return {
        "input_ids": torch.tensor(ids, dtype=torch.int64),
        "position_ids": torch.arange(len(ids)),
        "loss_mask": torch.tensor(mask, dtype=torch.bool),
    }


def batch_of(samples: Sequence[Sample]) -> TensorDict:
    """Return samples as one batch."""
    return make_batch(samples)
