"""Embeddings of a call in which images and videos stand in their tokens' places."""

from typing import Any

from torch import Tensor, nn

from engines.media.vision_inputs import VisionInputs


def embeddings(decoder: Any, tower: nn.Module, input_ids: Tensor, vision: VisionInputs) -> Tensor:
    """Return the decoder's input embeddings [..., H] of `input_ids`, with the tower's features at `vision.slots`.

    Slots count the flattened tokens. Connected to the tower even where no token takes a feature.
    """
    embedded = decoder.get_input_embeddings()(input_ids)
    features = tower(vision.patches, grid_thw=vision.grid_thw).pooler_output.to(embedded.dtype)
    flat = embedded.flatten(0, -2).index_put((vision.slots,), features[vision.features])
    result: Tensor = flat.view(embedded.shape)
    return result
