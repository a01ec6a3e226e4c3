"""Settings as YAML, `--print-config` and `--config FILE`: the keys are the flags' names, nested at their dots.

Only true and false are truth values, and 1e-6 is a number; what is printed is read back to the same settings.
"""

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import yaml

from apps.common.cli.flags import SettingsError, flag, leaves
from apps.common.cli.words import hint_of

RESOLVERS = (
    ("bool", "true|false", "tf"),
    ("null", "null|~|", ["n", "~", ""]),
    ("int", "[-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+.0123456789"),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


for _tag, _pattern, _first in RESOLVERS:
    for _kind in (_Loader, _Dumper):
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def dump_yaml(config: Any, owned: Mapping[str, str]) -> str:
    """Return all settings that have a flag as YAML, in their order of definition; `owned`: paths without a flag."""
    tree: dict[str, Any] = {}
    for path, value, _ in leaves(config):
        if path not in owned:
            *groups, last = _key(path).split(".")
            place = tree
            for group in groups:
                place = place.setdefault(group, {})
            place[last] = _plain(_typed(_plain(value), hint_of(type(config), path)))  # a float of 80 is 80.0
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def load_yaml(kind: Any, default: Any, path: Path, owned: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of a file by dotted path.

    Raises:
        SettingsError: the file can't be read, has unknown keys, or values of another type; all of it.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError([f"--config {path} can't be read: {error}"]) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise SettingsError([f"--config {path} holds no settings: a line of it is such as max_steps: 100"])
    paths = {_key(leaf): leaf for leaf, _, _ in leaves(default) if leaf not in owned}
    problems, values = [], {}
    for key, value in _entries(tree, "", paths):
        name = key.replace("-", "_")
        if name not in paths:
            near = difflib.get_close_matches(name, paths, n=1)
            problems.append(f"{path}: there is no setting {key}" + (f", perhaps you meant {near[0]}" if near else ""))
            continue
        try:
            values[paths[name]] = _typed(value, hint_of(kind, paths[name]))
        except ValueError as error:
            problems.append(f"{path}: {key} must be {error}, got {value!r}")
    if problems:
        raise SettingsError(problems)
    return values


def _key(path: str) -> str:
    return flag(path).removeprefix("--").replace("-", "_")


def _entries(tree: Mapping[Any, Any], prefix: str, paths: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name.replace("-", "_") not in paths:
            yield from _entries(value, f"{name}.", paths)
        else:
            yield name, value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return str(value) if isinstance(value, Path) else value


def _typed(value: Any, hint: Any) -> Any:
    """Return a value as a field of this type has it; ValueError says what it must be."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None:
            if type(None) in inner:
                return None
            raise ValueError("set")
        return _typed(value, next(one for one in inner if one is not type(None)))
    if origin is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in inner):
            raise ValueError("one of " + ", ".join(map(str, inner)))
        return value
    if origin is tuple:
        if not isinstance(value, list) or (inner[-1] is not Ellipsis and len(value) != len(inner)):
            raise ValueError("a list" if inner[-1] is Ellipsis else f"a list of {len(inner)}")
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_typed(entry, kind) for entry, kind in zip(value, kinds, strict=True))
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str):
        return Path(value)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text (quoted)", Path: "a path"}
    if type(value) is not hint:
        raise ValueError(names[hint])
    return value
