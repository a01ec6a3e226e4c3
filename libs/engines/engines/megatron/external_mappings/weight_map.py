"""The map of which box of which transformers tensor a Megatron parameter is: ours, or mbridge's for more families."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from engines.families.registry import family_of
from engines.megatron.config.model_sizes import MBRIDGE_TYPES, ModelSizes
from engines.megatron.external_mappings.mbridge import MbridgeMap
from engines.megatron.weights.bridge import MappedParameter, Place, Shape, held_by, tensor_shapes
from engines.mtp.head import head_of
from engines.parallel.stages import Split


class WeightMap(Protocol):
    """Sizes of a model, the shapes of its tensors by name, and what a rank holds of them."""

    @property
    def sizes(self) -> ModelSizes:
        """The model's sizes; see `ModelSizes`."""

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """The shape of every tensor of the transformers model that is trained, in the order of exports."""

    def held(self, stages: Sequence[nn.Module], place: Place, split: Split) -> tuple[MappedParameter, ...]:
        """Return all parameters of the rank at `place`, whose virtual stages are `stages`."""


@dataclass(frozen=True)
class OwnMap:
    """Our own map, by `engines.megatron.weights.bridge`."""

    sizes: ModelSizes

    @property
    def shapes(self) -> Mapping[str, Shape]:
        """See `WeightMap`."""
        return tensor_shapes(self.sizes)

    def held(self, stages: Sequence[nn.Module], place: Place, split: Split) -> tuple[MappedParameter, ...]:
        """See `WeightMap`."""
        del stages  # a pure function of sizes and place
        return held_by(self.sizes, place.layout, place.layout.rank_of(place.at), split)


def weight_map(model: Any) -> WeightMap:
    """Return the map for a transformers model that `engines.megatron.config.model_sizes.supported` admits."""
    if model.config.get_text_config().model_type in MBRIDGE_TYPES:
        return MbridgeMap.of(model)
    sizes = ModelSizes.of(model.config, family_of(model.config).sees(model))
    return OwnMap(replace(sizes, mtp=head_of(model) is not None))
