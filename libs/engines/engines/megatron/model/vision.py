"""The vision tower of a model under Megatron: transformers' own, whole on each rank that embeds tokens.

It exchanges nothing, so a rank runs it on the images alone whose tokens it holds between layers, and not at all where
it has none: what ranks exchange is the same with images and without. Features go into the places of their tokens in
this rank's part of the embeddings, so that nothing is scattered again. Its weights are parts of the bridge's map like
any other, which makes loading, exports and checkpoints.

A trained tower belongs to the first stage: its gradients lie in megatron-core's buffers, which add them up over the
ranks that split a batch, and as each tensor-parallel rank saw its own tokens' images alone, Megatron adds those up as
it does with a norm's (`sequence_parallel`). A rank without images has zeros there from the start of the step.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.families.registry import family_of
from engines.loading import cast_parameters
from engines.media.vision_inputs import VisionInputs
from engines.media.vision_settings import VisionSettings
from engines.megatron.weights.bridge import Box, BoxMapping, MappedParameter, Place, Shape
from engines.megatron.weights.parameters import HeldParameter
from engines.weights.empty_model import allocate

TOWER = "model.visual."
STAGE_NAME = "visual"
"""Name of a trained tower in its stage."""


@dataclass(frozen=True)
class Features:
    """`values` [M, H] stand at tokens `slots` i64[M] of those that this rank has between layers."""

    slots: Tensor
    values: Tensor

    def put(self, hidden: Tensor) -> Tensor:
        """Replace embeddings [t, 1, H] at the slots; those that were there get no gradient."""
        return hidden.index_put((self.slots,), self.values.to(hidden.dtype).unsqueeze(1))


def tower_shapes(model: Any) -> dict[str, Shape]:
    """Return the shape of every tensor of a model's tower, by live name; an empty dict for a text model."""
    tower = family_of(model.config).tower(model)
    return {} if tower is None else {f"{TOWER}{name}": tuple(p.shape) for name, p in tower.named_parameters()}


class Tower:
    """A model's tower on this rank, its weights not set."""

    def __init__(self, model: Any, place: Place, dtype: torch.dtype, device: torch.device, trained: bool) -> None:
        """Copy the tower of `model`, the transformers module, which keeps its own. `trained`: with gradients."""
        self.settings = VisionSettings.of(model.config)
        self.place = place
        tower = family_of(model.config).tower(model)
        assert tower is not None
        self.tower: nn.Module = cast_parameters(copy.deepcopy(tower), dtype).eval().requires_grad_(trained)
        allocate(self.tower, device)
        self.trained = trained
        self.held = tuple(self._held(name, tuple(p.shape)) for name, p in self.tower.named_parameters())
        for parameter in self.tower.parameters() if trained else ():
            parameter.sequence_parallel = place.layout.tp > 1

    @staticmethod
    def of(model: Any, place: Place, dtype: torch.dtype, device: torch.device, trained: bool) -> "Tower | None":
        """Make the tower of a vision-language model on a rank that embeds tokens; None elsewhere."""
        if place.at.pp or not tower_shapes(model):
            return None
        return Tower(model, place, dtype, device, trained)

    def _held(self, name: str, shape: Shape) -> MappedParameter:
        box = Box((0,) * len(shape), shape)
        pieces = (BoxMapping(TOWER + name, box, box),)
        return MappedParameter(0, f"{STAGE_NAME}.{name}", shape, pieces, self.place.at.tp == 0, self.place.first_copy)

    def features(self, seen: VisionInputs, tokens: int) -> Features | None:
        """Compute the features in this rank's part of a call of `tokens` tokens; None where that is text alone."""
        size, device = tokens // self.place.layout.tp, seen.slots.device
        own = torch.arange(size, device=device) + self.place.at.tp * size
        mine = seen.shard(own, torch.ones_like(own, dtype=torch.bool), tokens, self.settings)
        if not len(mine.slots):
            return None
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            made = self.tower(mine.patches, grid_thw=mine.grid_thw).pooler_output
        return Features(mine.slots, made[mine.features])


def trained_in(stage: nn.Module, tower: Tower | None) -> tuple[MappedParameter, ...]:
    """Add a trained tower to this first stage, and return the map of its parameters; an empty one otherwise."""
    if tower is None or not tower.trained:
        return ()
    stage.add_module(STAGE_NAME, tower.tower)
    return tower.held


def frozen_in(tower: Tower | None) -> tuple[HeldParameter, ...]:
    """Return the parameters of a frozen tower."""
    if tower is None or tower.trained:
        return ()
    return tuple(HeldParameter(one, p) for one, p in zip(tower.held, tower.tower.parameters(), strict=True))


def taken_over(parts: Mapping[Any, Tensor]) -> None:
    """Copy the more exact values of parts into their parameters."""
    for part, values in parts.items():
        if values.data_ptr() != part.values.data_ptr():
            part.values.copy_(values)
