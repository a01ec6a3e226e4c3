"""Images in vLLM's process: patches and places go straight to vLLM's own model, past its picture and text processors.

The trainer has cut and tokenised already what vLLM would do in its own way. So the processor of its Qwen3.5 is
replaced by one that only says how large an image may be, and each prompt comes with its images as vLLM's processors
would have made them. This vLLM reads no picture, tokenizer or preprocessor settings.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.inputs.engine import MultiModalInput, mm_input
from vllm.model_executor.models import qwen3_5
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseMultiModalProcessor, BaseProcessingInfo

from rollout.private_api import forget_processor

_NEVER = "images come as patches: vLLM has nothing to read here"
VISION_MODELS = (qwen3_5.Qwen3_5ForConditionalGeneration, qwen3_5.Qwen3_5MoeForConditionalGeneration)


class _Info(BaseProcessingInfo):  # type: ignore[misc]  # vLLM is not there to be checked
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": None}

    def get_mm_max_tokens_per_item(self, seq_len: int, mm_counts: Mapping[str, int]) -> Mapping[str, int]:
        del mm_counts
        return {"image": seq_len}


class _Dummies(BaseDummyInputsBuilder[_Info]):  # type: ignore[misc]  # vLLM is not there to be checked
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        raise NotImplementedError(_NEVER)

    def get_dummy_mm_data(self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Any) -> Any:
        raise NotImplementedError(_NEVER)


class _Processor(BaseMultiModalProcessor[_Info]):  # type: ignore[misc]  # vLLM is not there to be checked
    requires_tokenizer = False

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        raise NotImplementedError(_NEVER)

    def _get_prompt_updates(self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any) -> Any:
        raise NotImplementedError(_NEVER)


def replace_processors() -> None:
    """Register processors that take images as patches, in a process that serves one engine for its whole life."""
    for model in VISION_MODELS:
        forget_processor(model)
        MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_Dummies)(model)


def arguments(known: Collection[str]) -> dict[str, Any]:
    """Return the engine arguments for such images, for a vLLM that has the `known` ones."""
    settings = {"mm_processor_cache_gb": 0, "skip_mm_profiling": True}
    normalises = "mm_device_do_normalize"  # on with a preprocessor config: it would normalise patches twice
    return settings | ({normalises: False} if normalises in known else {})  # 0.26 does not do so on a device


class ReceivedImage(NamedTuple):
    """An image as received: its name, its grid, and its patches f32[P, values]."""

    name: str
    grid: list[int]
    patches: Tensor


def received_images(headers: Sequence[Sequence[Any]], data: bytearray) -> list[ReceivedImage]:
    """Return the images after a message: (name, grid, values of a patch) of each, and the patches of all."""
    images, start = [], 0
    for name, grid, numbers in headers:
        count = grid[0] * grid[1] * grid[2] * numbers
        patches = torch.frombuffer(data, dtype=torch.float32, count=count, offset=start).view(-1, numbers)
        images.append(ReceivedImage(name, grid, patches))
        start += patches.nbytes
    return images


def seen_prompt(
    ids: list[int], images: Sequence[ReceivedImage], places: Sequence[int], merge_size: int
) -> MultiModalInput:
    """Return a prompt with its images, the first token of each at its place."""
    return mm_input(
        ids,
        MultiModalKwargsItems({"image": [item_of(one) for one in images]}),
        {"image": [one.name for one in images]},
        {"image": [place_of(one.grid, place, merge_size) for one, place in zip(images, places, strict=True)]},
    )


def place_of(grid: Sequence[int], place: int, merge_size: int) -> PlaceholderRange:
    """Return the range of an image's tokens in a prompt."""
    return PlaceholderRange(offset=place, length=grid[0] * grid[1] * grid[2] // merge_size**2)


def item_of(image: ReceivedImage) -> MultiModalKwargsItem:
    """Return an image as an argument of vLLM's model."""
    grids = torch.tensor([image.grid], dtype=torch.int64)
    fields = {
        "pixel_values": (image.patches, MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1))),
        "image_grid_thw": (grids, MultiModalFieldConfig.batched("image", keep_on_cpu=True)),
    }
    return MultiModalKwargsItem({name: field.build_elems(name, data)[0] for name, (data, field) in fields.items()})
