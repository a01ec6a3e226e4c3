"""The frozen vision tower of a model under Megatron: transformers' own, whole on each rank that embeds tokens.

It has no gradient and exchanges nothing, so a rank runs it on the images alone whose tokens it holds between layers,
and not at all where it has none: what ranks exchange is the same with images and without. Features go into the places
of their tokens in this rank's part of the embeddings, so that nothing is scattered again. Its weights are parts of the
bridge's map like any other, which makes loading, exports and checkpoints.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engines.families.registry import family_of
from engines.loading import cast_parameters
from engines.media.inputs import VisionInputs
from engines.media.settings import VisionSettings
from engines.megatron.bridge import Box, Held, Piece, Place, Shape
from engines.megatron.parameters import HeldParameter
from engines.weights.empty import allocate

TOWER = "model.visual."


@dataclass(frozen=True)
class Features:
    """`values` [M, H] stand at tokens `slots` i64[M] of those that this rank has between layers."""

    slots: Tensor
    values: Tensor

    def put(self, hidden: Tensor) -> Tensor:
        """Replace embeddings [t, 1, H]: the tokens that stood there get no gradient."""
        return hidden.index_put((self.slots,), self.values.to(hidden.dtype).unsqueeze(1))


def tower_shapes(model: Any) -> dict[str, Shape]:
    """The shape of every tensor of a model's tower, by live name; none of a text model."""
    tower = family_of(model.config).tower(model)
    return {} if tower is None else {f"{TOWER}{name}": tuple(p.shape) for name, p in tower.named_parameters()}


class FrozenTower:
    """A model's tower on this rank, its weights not set."""

    def __init__(self, model: Any, place: Place, dtype: torch.dtype, device: torch.device) -> None:
        """`model`: the transformers module, which keeps its own."""
        self.settings = VisionSettings.of(model.config)
        self.place = place
        found = family_of(model.config).tower(model)
        assert found is not None
        self.tower: nn.Module = cast_parameters(copy.deepcopy(found), dtype).eval().requires_grad_(False)
        allocate(self.tower, device)
        self.parameters = tuple(self._held(name, p) for name, p in self.tower.named_parameters())

    @staticmethod
    def of(model: Any, place: Place, dtype: torch.dtype, device: torch.device) -> "FrozenTower | None":
        """Make that of a vision-language model on a rank that embeds tokens; None elsewhere."""
        if place.at.pp or not tower_shapes(model):
            return None
        return FrozenTower(model, place, dtype, device)

    def _held(self, name: str, parameter: nn.Parameter) -> HeldParameter:
        shape = tuple(parameter.shape)
        box = Box((0,) * len(shape), shape)
        speaks = self.place.at.tp == 0
        held = Held(0, f"visual.{name}", shape, (Piece(TOWER + name, box, box),), speaks, self.place.first_copy)
        return HeldParameter(held, parameter)

    @torch.no_grad()
    def features(self, seen: VisionInputs, tokens: int) -> Features | None:
        """What stands in this rank's part of a call of `tokens` tokens; None where that is text alone."""
        size, device = tokens // self.place.layout.tp, seen.slots.device
        own = torch.arange(size, device=device) + self.place.at.tp * size
        mine = seen.shard(own, torch.ones_like(own, dtype=torch.bool), tokens, self.settings)
        if not len(mine.slots):
            return None
        made = self.tower(mine.patches, grid_thw=mine.grid_thw).pooler_output
        return Features(mine.slots, made[mine.features])


def taken_over(parts: Mapping[Any, Tensor]) -> None:
    """Give parameters the values of their more exact copies."""
    for part, values in parts.items():
        if values.data_ptr() != part.values.data_ptr():
            part.values.copy_(values)
