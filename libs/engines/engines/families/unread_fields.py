"""Config fields that no modelling code reads: what other tools leave in config.json for themselves.

The installed transformers is asked, by the text of its modelling code. A field that any model there reads has a meaning
for the numbers, and so may one that a newer transformers has written.
"""

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import transformers
from packaging.version import InvalidVersion, Version

_NOTES = frozenset(
    [
        *("auto_map", "finetuning_task", "is_llama_config", "pruned_heads", "tie_encoder_decoder", "torchscript"),
        *("unsloth_fixed", "unsloth_version", "use_bfloat16", "_attn_implementation_autoset"),
    ]
)
"""Fields known to be notes, whichever transformers wrote them. Code that `auto_map` names is run on request alone."""
_CODE = ("models/*/modeling_*.py", "modeling_*.py", "masking_utils.py", "cache_utils.py", "integrations/*.py")


def unread_fields(config: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of these config fields that no modelling code of transformers reads; of a newer one's, notes."""
    try:
        newer = Version(getattr(config, "transformers_version", None) or "0") > Version(transformers.__version__)
    except InvalidVersion:
        newer = True
    names = tuple(names)
    asked = {name: (name, *other_names(config, name)) for name in names if name not in _NOTES}
    every = tuple(dict.fromkeys(one for known in asked.values() for one in known))
    read = frozenset(every) if newer else _read(every)
    return tuple(name for name in names if read.isdisjoint(asked.get(name, ())))


def other_names(config: Any, name: str) -> tuple[str, ...]:
    """Return the names under which modelling code may read a field of a config beside its own."""
    return tuple(other for other, own in config.get_text_config().attribute_map.items() if own == name)


@cache
def _read(names: tuple[str, ...]) -> frozenset[str]:
    """Return those of these names that modelling code reads as fields; its files are gone through once."""
    left = {name: re.compile(rf"config\.{re.escape(name)}\b|[\"']{re.escape(name)}[\"']") for name in names}
    root = Path(transformers.__file__).parent
    for file in (file for pattern in _CODE for file in root.glob(pattern)):
        if not left:
            break
        text = file.read_text(encoding="utf-8")
        left = {name: reads for name, reads in left.items() if name not in text or not reads.search(text)}
    return frozenset(names) - frozenset(left)
