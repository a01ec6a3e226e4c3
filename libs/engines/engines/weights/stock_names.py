"""The name under which transformers' own loader looks for each tensor of a checkpoint in a model."""

from collections.abc import Iterable
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key


def stock_names(model: Any, checkpoint: Iterable[str]) -> dict[str, str]:
    """Return, by name in a checkpoint, the tensor of the model (a transformers one, maybe empty) that it is read into,
    or is a part of; a name that the model does not have stands for itself or for what it is renamed to."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    live, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, str] = {}
    for name in checkpoint:
        key, _ = rename_source_key(name, renamings, converters, prefix, live)
        if key not in live and name in live:  # as in transformers: it should not have been renamed
            key, _ = rename_source_key(name, [], [], prefix, live)
        found[name] = key
    return found
