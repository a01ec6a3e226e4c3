"""How far a sequence can go on with the keys that a sampler has cached."""

from collections.abc import Mapping
from typing import Any

REASON = (
    "past them its rotary embedding (longrope) turns all tokens of a sequence by another table, which training takes "
    "and a sampler's caches don't follow"
)


def longest_of_one_table(config: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence whose rotary embeddings come from one table; None where all do.

    `config`: a text config of transformers as a mapping, or the config.json of one.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parts = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    name = "original_max_position_embeddings"
    found = [
        part.get(name) or config[name] for part in parts if "longrope" in (part.get("rope_type"), part.get("type"))
    ]
    return min(found, default=None)


def longest_of(config: Mapping[str, Any], max_length: int | None) -> int:
    """Return the most tokens of a prompt with its completion: `max_length`, else what the config's positions allow.

    Raises:
        ValueError: more are asked for than one table of rotary embeddings has.
    """
    limit = longest_of_one_table(config)
    if limit is not None and (max_length or 0) > limit:
        raise ValueError(f"max_length={max_length} is over the {limit} tokens of one table: {REASON}; lower max_length")
    return max_length or limit or int(config["max_position_embeddings"])
