"""A chat template for trial renderings: the same one in the same sandbox, whose answers to common questions are known.

Strategy
1. Most of what a rendering takes is the sandbox's way to an attribute (`message.content`, `ns.first`, `text.split`):
   Python's attribute first, its failure, then the item, and a dozen type checks for what is safe.
2. transformers compiles each source once and keeps it. A source with an empty comment before it is another one, with an
   environment of its own, so the one that everybody else uses stays as it is.
3. In that environment attributes of plain dicts, texts, namespaces and loops are answered at once where the sandbox's
   own answer is certain: keys that name no method, methods that change nothing, values that are plain data. All
   else goes to the sandbox.
4. It is for renderings whose text is held to another one's (`message_attribution`), and for what was said before a turn
   (`masks`); the text that is trained on is asked for without it.

Invariants (tests): it renders what the template renders, and refuses what the sandbox refuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

_PREFIX = "{##}\n"  # a comment that writes nothing: transformers drops the line end behind it
_PLAIN = frozenset((str, int, bool, float, type(None), dict, list))
_DICT_NAMES = frozenset(dir(dict))
_DICT_READERS = frozenset(("get", "items", "keys", "values"))
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_LOOP_NAMES = frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem", "revindex", "revindex0"))
_MISSING = object()
Getter = Callable[[Any, str], Any]


def cached_source(source: str) -> str | None:
    """Return a source with the same rendering, but faster; None for a transformers release of another structure."""
    transformers = sys.modules.get("transformers.utils.chat_template_utils")
    compile_source = getattr(transformers, "_compile_jinja_template", None)
    sandbox = sys.modules.get("jinja2.sandbox")
    if compile_source is None or sandbox is None:
        return None
    changed = _prefixed(source)
    environment = compile_source(changed).environment
    if "getattr" not in vars(environment):
        if type(environment) is not sandbox.ImmutableSandboxedEnvironment or not environment.trim_blocks:
            return None
        space = environment.globals.get("namespace")
        loop = sys.modules["jinja2.runtime"].LoopContext
        environment.getattr = _getter(environment.getattr, space, loop)
    return changed


@lru_cache(maxsize=64)
def _prefixed(source: str) -> str:
    return _PREFIX + source  # kept, for the hash that it remembers


def _getter(sandboxed: Getter, space: Any, loop: Any) -> Getter:
    """Return the attribute function for the sandbox, with its types of namespaces and loops."""

    def attribute_of(obj: Any, name: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if name not in _DICT_NAMES:
                value = obj.get(name, _MISSING)
                if value is not _MISSING:
                    return value
            elif name in _DICT_READERS:
                return getattr(obj, name)
        elif kind is str:
            if name in _STR_METHODS:
                return getattr(obj, name)
        elif (kind is space and name[:1] != "_") or (kind is loop and name in _LOOP_NAMES):
            value = getattr(obj, name, _MISSING)
            if type(value) in _PLAIN:
                return value
        return sandboxed(obj, name)

    return attribute_of
