"""Placeholders and token types beside a real multimodal processor of transformers: Qwen3-VL's, which Qwen3.5 has too.

Its image processor is the one of PIL and numpy. The video processor needs torchvision, so the grid of a video is given
here; how the processor writes the video's frames and time stamps is its own.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.media import grid_tokens, images, videos
from chat_tools.rendering.render import render
from chat_tools.testing.tokenizer import tiny_tokenizer

TEMPLATE = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- for part in ([{'type': 'text', 'text': m.content}] if m.content is string else m.content) -%}
{%- if part.type == 'text' -%}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- part.text + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- part.text -}}{%- endif -%}
{%- else -%}
{{- '<|vision_start|>' + {'image': '<|image_pad|>', 'video': '<|video_pad|>'}[part.type] + '<|vision_end|>' -}}
{%- endif -%}
{%- endfor -%}
{{- ('' if m.role == 'assistant' else '<|im_end|>') + '\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
GRID = (3, 4, 6)  # of the video: time, height, width in patches
FRAMES = 5


class Film:
    """In the place of the video processor: a grid and what is known of the video, no pixels."""

    merge_size, temporal_patch_size = 2, 2
    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __call__(self, videos: Any, **_: Any) -> dict[str, Any]:
        metadata = [SimpleNamespace(fps=2.0, frames_indices=list(range(0, 2 * FRAMES, 2))) for _ in videos]
        return {"video_grid_thw": np.array([GRID] * len(videos)), "video_metadata": metadata}


class Processor(Qwen3VLProcessor):  # type: ignore[misc]
    """The real one, without its check of the video part's class, which imports torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        return Film if isinstance(argument, Film) else super().check_argument_for_proper_class(argument_name, argument)


@pytest.fixture(scope="module")
def processor() -> Processor:
    tokenizer = tiny_tokenizer("chatml", template=TEMPLATE)
    tokenizer.add_tokens(["<|vision_start|>", "<|vision_end|>"], special_tokens=True)
    pictures = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=32 * 32, max_pixels=32 * 32 * 40)
    return Processor(image_processor=pictures, tokenizer=tokenizer, video_processor=Film(), chat_template=TEMPLATE)


def picture(width: int, height: int) -> dict[str, Any]:
    pixels = np.random.default_rng(width).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return {"type": "image", "image": Image.fromarray(pixels)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


ONE = [{"role": "user", "content": [picture(70, 100), text("what is it?")]}]
MORE = [
    {"role": "user", "content": [picture(70, 100), text("see"), picture(333, 64), text("and "), picture(32, 32)]},
    {"role": "assistant", "content": [text("hello there")]},
    {"role": "user", "content": [text("bye"), picture(300, 280)]},
    {"role": "assistant", "content": [text("see you")]},
]
FILM = [
    {"role": "user", "content": [picture(64, 96), {"type": "video", "video": np.zeros((FRAMES, 8, 8, 3))}, text("hi")]},
    {"role": "assistant", "content": [text("hello")]},
]


def media_of(processor: Processor, messages: list[dict[str, Any]], out: Any) -> list[Any]:
    """What the caller of `render` has: the grids of the processed media, and the texts of the videos' frames."""
    kinds = [part["type"] for m in messages for part in m["content"]]
    media = []
    if "image" in kinds:
        media.append(images([grid_tokens(tuple(grid)) for grid in out["image_grid_thw"]]))
    if "video" in kinds:
        media.append(videos([processor.replace_video_token(Film()([None]), 0)] * kinds.count("video")))
    return media


@pytest.mark.parametrize("messages", [ONE, MORE, FILM], ids=["an image", "images in two turns", "image and video"])
@pytest.mark.parametrize("prompted", [False, True])
def test_ids_mask_and_token_types_are_the_processors(
    processor: Processor, messages: list[dict[str, Any]], prompted: bool
) -> None:
    out = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        add_generation_prompt=prompted,
        return_assistant_tokens_mask=True,
    )
    rendered = render(
        processor.tokenizer, messages, add_generation_prompt=prompted, media=media_of(processor, messages, out)
    )
    assert rendered.ids == list(out["input_ids"][0])
    assert rendered.mm_token_type_ids == list(out["mm_token_type_ids"][0])
    answers = [part["text"] + "<|im_end|>" for m in messages if m["role"] == "assistant" for part in m["content"]]
    trained = [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]
    assert trained == processor.tokenizer("".join(answers))["input_ids"]
    # Before 5.23 a mask that follows an image is shifted: its places are those of the text before it grew.
    if messages is ONE or hasattr(Processor, "_adjust_assistant_masks_indices"):
        assert [int(m) for m in rendered.assistant_mask] == [int(m) for m in np.ravel(out["assistant_masks"])]
    assert rendered.problems == ()
    assert max(rendered.mm_token_type_ids) == (2 if messages is FILM else 1)


def test_a_running_conversation_is_the_processors_too(processor: Processor) -> None:
    """Token in, token out: what was sampled stays as it is, and an image comes in the next question."""
    last = processor.apply_chat_template(MORE[:3], tokenize=True, return_dict=True, add_generation_prompt=True)
    counts = [grid_tokens(tuple(grid)) for grid in last["image_grid_thw"]]
    begun = render(processor.tokenizer, MORE[:1], add_generation_prompt=True, media=[images(counts[:3])])
    sampled = processor.tokenizer("hello there<|im_end|>")["input_ids"]
    rendered = extend(begun.generated(sampled), MORE[2:3], media=[images(counts[3:])])
    assert rendered.ids == list(last["input_ids"][0])
    assert rendered.mm_token_type_ids == list(last["mm_token_type_ids"][0])
    assert [i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m] == sampled
