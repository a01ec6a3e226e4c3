"""The same chat template in the same sandbox, whose answers to common questions are known.

Strategy
1. Most of what a rendering takes is the sandbox's way to an attribute (`message.content`, `ns.first`, `text.split`):
   Python's attribute first, its failure, then the item, and a dozen type checks for what is safe.
2. transformers compiles each source once and keeps it. A source with an empty comment before it is another one, with an
   environment of its own, so the one that everybody else uses stays as it is.
3. In that environment attributes of plain dicts, texts, namespaces and loops, and calls of the methods of texts and
   dicts, are answered at once where the sandbox's own answer is certain: keys that name no method, methods that change
   nothing, values that are plain data. All else goes to the sandbox.
4. What a template sees is made of plain data by transformers' own functions, once for all renderings of a conversation.

Invariants (tests): it renders what the template renders, and refuses what the sandbox refuses.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

_PREFIX = "{##}\n"  # a comment that writes nothing: transformers drops the line end behind it
_PLAIN = frozenset((str, int, bool, float, type(None), dict, list))
_DICT_NAMES = frozenset(dir(dict))
_DICT_READERS = frozenset(("get", "items", "keys", "values"))
_STR_METHODS = frozenset(name for name in dir(str) if name[0] != "_") - {"format", "format_map"}
_STR_CALLS = _STR_METHODS - {"join"}  # the items of which may come from the template
_LOOP_NAMES = frozenset(("index", "index0", "first", "last", "length", "previtem", "nextitem", "revindex", "revindex0"))
_PARTS = 64
_MISSING = object()
Getter = Callable[[Any, str], Any]
Caller = Callable[..., Any]


class PlainMessages(list[dict[str, Any]]):
    """Messages as a template sees them: plain data, no key whose value is None."""


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> PlainMessages | None:
    """Return messages as `apply_chat_template` gives them to a template; None for a release that has other functions.

    The names of reasoning are left as they are: `rendered_plain` gives a message all of them.
    """
    plain = plain_data()
    if plain is None:
        return None
    if isinstance(messages, PlainMessages):
        return messages
    return PlainMessages(
        dict(message) if texts_alone(message) else plain({k: v for k, v in message.items() if v is not None})
        for message in messages
    )


def texts_alone(data: Mapping[str, Any]) -> bool:
    """Return whether keys and values are texts: plain data as they are."""
    return {*map(type, data), *map(type, data.values())} == {str}


def plain_data() -> Callable[[Any], Any] | None:
    """Return transformers' function that makes plain data of what a template is given; None where it has none."""
    transformers = sys.modules.get("transformers.utils.chat_template_utils")
    named = getattr(transformers, "_alias_reasoning_fields", None) is not None
    plain: Callable[[Any], Any] | None = getattr(transformers, "_plain_template_data", None)
    return plain if named else None


def rendered_plain(
    source: str, messages: PlainMessages, prompted: bool, given: Mapping[str, Any], marked: bool = False
) -> tuple[str, list[tuple[int, int]] | None]:
    """Render a `cached_source` with plain messages, tools and options, as `render_jinja_template` does.

    With `marked`, the blocks come too that `{% generation %}` marks. transformers joins all that is written so far to
    know where each begins: this keeps it in few parts.
    """
    transformers = sys.modules["transformers.utils.chat_template_utils"]
    template = transformers._compile_jinja_template(source)
    environment, known = template.environment, _globals_of(template)
    seen = {**known, **given, "messages": transformers._alias_reasoning_fields(messages)}
    seen["add_generation_prompt"] = prompted
    written = template.root_render_func(
        environment.context_class(environment, seen, template.name, template.blocks, globals=known)
    )
    if not marked:
        return "".join(written), None
    parts: list[str] = []
    blocks: list[tuple[int, int]] = []
    with environment.activate_tracker(parts, blocks):
        for part in written:
            parts.append(part)
            if len(parts) > _PARTS:
                parts[:] = ["".join(parts)]
    return "".join(parts), blocks


@lru_cache(maxsize=64)
def _globals_of(template: Any) -> dict[str, Any]:
    """Return what a template sees beside what it is given: `Template.render` joins it anew each time."""
    return dict(template.globals)


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
        runtime = sys.modules["jinja2.runtime"]
        environment.getattr = _getter(environment.getattr, space, runtime.LoopContext)
        environment.call = _caller(environment.call, runtime.Macro)
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


def _caller(sandboxed: Caller, macro: Any) -> Caller:
    """Return the function that calls for the sandbox.

    A method of a text or a dict needs nothing of the template, a macro what Jinja gives to every macro.
    """

    def call(context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if type(function) is BuiltinMethodType:
            kind, name = type(function.__self__), function.__name__
            if (kind is str and name in _STR_CALLS) or (kind is dict and name in _DICT_READERS):
                kwargs.pop("_block_vars", None)
                kwargs.pop("_loop_vars", None)
                return function(*args, **kwargs)
        elif type(function) is macro:
            kwargs.pop("_block_vars", None)
            kwargs.pop("_loop_vars", None)
            return function(context.eval_ctx, *args, **kwargs)
        return sandboxed(context, function, *args, **kwargs)

    return call
