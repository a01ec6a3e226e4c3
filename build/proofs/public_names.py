"""Print which public names and arguments of an older tree a newer one has lost: `pip install griffe`, then

    python build/proofs/public_names.py OLD_TREE NEW_TREE

Public is what the packages below libs/ hand out by their `__init__.py`, with arguments and public members. An earlier
name counts as kept where it is an alias: `old = new`, `_ALIASES`, `renamed("new")`, `@renamed_arguments(old="new")`.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe  # type: ignore[import-not-found]  # installed by hand


def load(tree: Path) -> tuple[Any, list[str]]:
    """Return the modules of a tree's libraries, and the dotted names of their packages."""
    inits = [init.parent.relative_to(tree / "libs").parts[1:] for init in tree.glob("libs/*/*/**/__init__.py")]
    loader = griffe.GriffeLoader(search_paths=[str(path) for path in tree.glob("libs/*")])
    for name in sorted({parts[0] for parts in inits}):
        loader.load(name)
    loader.resolve_aliases(implicit=True, external=False)
    return loader.modules_collection, sorted(".".join(parts) for parts in inits if "benchmarks" not in parts)


def find(modules: Any, name: str) -> Any:
    """Return what a dotted name leads to, through aliases; None where there is nothing."""
    above, _, last = name.rpartition(".")
    try:
        target = modules[name].final_target if modules[name].is_alias else modules[name]
    except (KeyError, griffe.AliasResolutionError):
        package = find(modules, above) if above else None
        earlier = package.members.get("_ALIASES") if package else None
        new = re.search(rf"'{last}': '(\w+)'", str(earlier.value)) if earlier else None
        return find(modules, f"{above}.{new[1]}") if new else None
    new = re.fullmatch(r"(?:renamed\(')?(\w+)(?:'\))?", str(target.value)) if target.is_attribute else None
    leads = new is not None and new[1] != target.name and new[1] in target.parent.all_members
    return find(modules, f"{target.parent.path}.{new[1]}") if new and leads else target


def lost_arguments(old: Any, new: Any, name: str) -> Iterator[str]:
    """Yield what a call of the old function may hold that the new one refuses."""
    takes, was = ({one.name: one for one in each.parameters if one.name != "self"} for each in (new, old))
    decorators = getattr(new.all_members.get("__init__", new) if new.is_class else new, "decorators", [])
    marks = [str(one.value) for one in decorators if "renamed_arguments" in str(one.value)]
    earlier = dict(re.findall(r"(\w+)='(\w+)'", " ".join(marks)))
    for place, (argument, one) in enumerate(was.items()):
        kept = takes.get(argument) or takes.get(earlier.get(argument, ""))
        if kept is None:
            yield f"{name}({argument}=) is gone"
        elif one.default is not None and kept.default is None:
            yield f"{name}({argument}) is required now"
        elif "positional" in one.kind.value and "positional" in kept.kind.value and [*takes][place] != kept.name:
            yield f"{name}({argument}) is at another place"
    for one in set(takes) - set(was) - set(earlier.values()):
        if takes[one].default is None and "variadic" not in takes[one].kind.value:
            yield f"{name}({one}) is required"


def lost(old: Any, new: Any, modules: Any, name: str) -> Iterator[str]:
    """Yield what the new object lacks of the old one."""
    if new is None:
        yield f"{name} is gone"
    elif old.kind is not new.kind:
        yield f"{name}: {old.kind.value} is now {new.kind.value}"
    elif old.is_class or old.is_function:
        yield from lost_arguments(old, new, name)
        for member, one in old.all_members.items() if old.is_class else ():
            now = find(modules, new.all_members[member].path) if member in new.all_members else None
            if not member.startswith("_") and (now is None or one.is_function):
                yield from lost(one, now, modules, f"{name}.{member}")


if __name__ == "__main__":
    (OLD, packages), (NEW, _) = (load(Path(tree)) for tree in sys.argv[1:3])
    exports = [(package, one) for package in packages for one in OLD[package].members.values() if one.is_alias]
    public = [f"{p}.{one.name}" for p, one in exports if one.target_path.startswith(p.partition(".")[0] + ".")]
    missing = {text for name in public for text in lost(find(OLD, name), find(NEW, name), NEW, name)}
    print("\n".join([*sorted(missing), f"{len(public)} public names, {len(missing)} lost or changed"]))
    sys.exit(bool(missing))
