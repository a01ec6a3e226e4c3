"""The name under which transformers' own loader looks for each tensor of a checkpoint in a model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass(frozen=True)
class StockName:
    """Where a tensor of a checkpoint goes."""

    key: str
    """The tensor of the model that it is read into, or is a part of."""
    operations: tuple[tuple[str, int | None], ...] = ()
    """Classes of transformers' conversions that make that tensor, with their dimension; empty for a renamed one."""
    source: int = 0
    """Its number among the kinds of tensors that these take."""


def stock_names(model: Any, checkpoint: Iterable[str]) -> dict[str, StockName]:
    """Return, by name in a checkpoint, the tensor of the model (a transformers one, maybe empty) that it is read into,
    or is a part of; a name that the model does not have stands for itself or for what it is renamed to."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    live, prefix = model.state_dict(), model.base_model_prefix
    by_name: dict[str, StockName] = {}
    for name in checkpoint:
        key, pattern = rename_source_key(name, renamings, converters, prefix, live)
        if key not in live and name in live:  # as in transformers: it should not have been renamed
            key, pattern = rename_source_key(name, [], [], prefix, live)
        if pattern is None:
            by_name[name] = StockName(key)
            continue
        converter = by_pattern[pattern]
        operations = tuple((type(one).__name__, getattr(one, "dim", None)) for one in converter.operations)
        by_name[name] = StockName(key, operations, converter.source_patterns.index(pattern))
    return by_name


def saved_as(model: Any, live: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return empty tensors by the names under which transformers would save these tensors of a model."""
    saved: dict[str, Tensor] = revert_weight_conversion(
        model, {name: t.detach().to("meta") for name, t in live.items()}
    )
    return saved


def names_read(model: Any, checkpoint: Iterable[str]) -> frozenset[str]:
    """Return those names in a checkpoint that transformers' own loader reads into the model."""
    live = model.state_dict()
    return frozenset(name for name, read in stock_names(model, checkpoint).items() if read.key in live)
