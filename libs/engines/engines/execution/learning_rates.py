"""Learning rates by group: which of a configuration's each parameter has, as a multiple of the run's own.

The executor's optimizer keeps the multiple (`LR_SCALE`) with each of its parameter groups, so that one scheduled rate a
step is enough, and checkpoints name what each group was trained with.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from engines.adapters.lora import is_adapter
from engines.config import EngineConfig, parse_learning_rates
from engines.weights.disk_names import DiskNames
from engines.weights.model_weights import live_tensors

LR_SCALE = "lr_scale"


def rate_scales(config: EngineConfig, model: Any, names: DiskNames) -> dict[str, float]:
    """Return multiples of `config.lr` by live name, for the parameters that `config.learning_rates` names.

    `model` is whole (not sharded yet), and what is trained requires gradients. ValueError for a pattern that changes
    nothing (no name matches, all that match are frozen, or earlier patterns took them), or splits a parameter.
    """
    patterns = parse_learning_rates(config.learning_rates)
    if not patterns:
        return {}
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    disk = {name: _on_disk(names, name, tensor.shape) for name, tensor in live_tensors(model).items()}
    scales: dict[str, float] = {}
    for pattern, rate in patterns:
        matched = [name for name in disk if _holds(pattern, name, disk[name])]
        if not matched:
            raise ValueError(
                f"learning_rates: no parameter's name on disk holds {pattern!r}; the nearest are "
                + ", ".join(nearest(pattern, (one for each in disk.values() for one in each)))
            )
        if not trained.intersection(matched):
            raise ValueError(f"learning_rates: all that {pattern!r} names is frozen, as {disk[matched[0]][0]}")
        new = [name for name in matched if name in trained and name not in scales]
        if not new:
            raise ValueError(f"learning_rates: an earlier pattern has all that {pattern!r} names: put it first")
        scales |= dict.fromkeys(new, rate / config.lr)
    return scales


def scale_of(group: Mapping[str, Any]) -> float:
    """Return the learning rate multiple of an optimizer's group."""
    scale: float = group.get(LR_SCALE, 1.0)
    return scale


def nearest(pattern: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return the names most like a pattern, one for all layers and experts."""
    like = {re.sub(r"\.\d+\.", ".0.", name): None for name in names}
    words = {word: name for name in reversed(like) for word in (name, *name.split("."))}
    close = get_close_matches(pattern.replace("\\", ""), list(words), n=2 * count, cutoff=0.0)
    return list(dict.fromkeys(words[word] for word in close))[:count]


def _on_disk(names: DiskNames, name: str, shape: Any) -> tuple[str, ...]:
    if is_adapter(name):  # of a layer, and named beside its weight
        return (names.parts(name, shape)[0].name,)
    return tuple(part.name for part in names.parts(name, shape))


def _holds(pattern: str, name: str, disk: tuple[str, ...]) -> bool:
    """Return whether the pattern names a parameter."""
    matches = [one for one in disk if re.search(pattern, one)]
    if matches and len(matches) < len(disk):
        other = next(one for one in disk if one not in matches)
        raise ValueError(
            f"learning_rates: {pattern!r} names {matches[0]} and not {other}, which are one parameter here ({name})"
        )
    return bool(matches)
