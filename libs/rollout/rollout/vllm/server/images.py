"""Images in vLLM's process: patches and places go straight to vLLM's own model, past its picture and text processors.

What vLLM would cut and tokenise anew, in its own way, is the trainer's already. So the processor of its Qwen3.5 is
replaced by one that only says how large an image may be, and each prompt comes with its images as vLLM's processors
would have left them. Nothing of this vLLM reads a picture, a tokenizer or a preprocessor's settings.
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

_NEVER = "images come as patches: vLLM has nothing to read here"
SEEING = (qwen3_5.Qwen3_5ForConditionalGeneration, qwen3_5.Qwen3_5MoeForConditionalGeneration)


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
    """Have vLLM's models that see take images as patches. In a process that serves one engine, for its whole life."""
    for model in SEEING:
        del model._processor_factory
        MULTIMODAL_REGISTRY.register_processor(_Processor, info=_Info, dummy_inputs=_Dummies)(model)


def arguments(known: Collection[str]) -> dict[str, Any]:
    """Engine arguments that go with it, for a vLLM that has the `known` ones."""
    found = {"mm_processor_cache_gb": 0, "skip_mm_profiling": True}
    normalises = "mm_device_do_normalize"  # on where a preprocessor's settings lie beside the model: patches twice
    return found | ({normalises: False} if normalises in known else {})  # 0.26 does not do so on a device


class Picture(NamedTuple):
    """An image as it came: its name, its grid, and its patches f32[P, numbers]."""

    name: str
    grid: list[int]
    patches: Tensor


def pictures_of(described: Sequence[Sequence[Any]], data: bytearray) -> list[Picture]:
    """Return the images that follow a message: (name, grid, numbers of a patch) of each, and the patches of all."""
    found, start = [], 0
    for name, grid, numbers in described:
        count = grid[0] * grid[1] * grid[2] * numbers
        patches = torch.frombuffer(data, dtype=torch.float32, count=count, offset=start).view(-1, numbers)
        found.append(Picture(name, grid, patches))
        start += patches.nbytes
    return found


def seen_prompt(ids: list[int], pictures: Sequence[Picture], places: Sequence[int], merge_size: int) -> MultiModalInput:
    """Return a prompt with its images, the first token of each at its place."""
    return mm_input(
        ids,
        MultiModalKwargsItems({"image": [item_of(one) for one in pictures]}),
        {"image": [one.name for one in pictures]},
        {"image": [place_of(one.grid, place, merge_size) for one, place in zip(pictures, places, strict=True)]},
    )


def place_of(grid: Sequence[int], place: int, merge_size: int) -> PlaceholderRange:
    """Return where the tokens of an image stand in a prompt."""
    return PlaceholderRange(offset=place, length=grid[0] * grid[1] * grid[2] // merge_size**2)


def item_of(picture: Picture) -> MultiModalKwargsItem:
    """Return what vLLM's model is called with for an image."""
    grids = torch.tensor([picture.grid], dtype=torch.int64)
    fields = {
        "pixel_values": (picture.patches, MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1))),
        "image_grid_thw": (grids, MultiModalFieldConfig.batched("image", keep_on_cpu=True)),
    }
    return MultiModalKwargsItem({name: field.build_elems(name, data)[0] for name, (data, field) in fields.items()})
