"""Does every setting do something? One field is changed, and what a run leaves on disk must change too.

A field without any effect needs a refusal, or must be deleted. These count as effects:

1. The change is refused with a ValueError that names the field or its flag.
2. Otherwise two small runs, with the old and the new value, differ in what they log (but for the clock), the files they
   leave, the weights they export, or the error they end with.
3. Otherwise they differ in the operations that they carry out on tensors (some settings trade memory for time).
"""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch.utils._python_dispatch import TorchDispatchMode

from apps.common.cli.flags import flag, leaves

C = TypeVar("C")
CLOCK = ("time", "tokens_per_second", "weights/pause_ms", "weights/staging_ms", "weights/link_share")
NOT_COMPARED = {"config.json", "report.html", "tensorboard"}  # these hold every setting, or the clock


@dataclass(frozen=True)
class Change:
    """Another value of a field, and other fields that both runs change so that it can have an effect."""

    value: Any
    both: Mapping[str, Any] = field(default_factory=dict)


def with_value(config: C, path: str, value: Any) -> C:
    """Return the configuration with one field changed, by its dotted path."""
    name, _, rest = path.partition(".")
    return replace(config, **{name: with_value(getattr(config, name), rest, value) if rest else value})  # type: ignore[type-var]


def with_values(config: C, values: Mapping[str, Any]) -> C:
    """Return the configuration with several fields changed."""
    for path, value in values.items():
        config = with_value(config, path, value)
    return config


def other_value(kind: type, path: str, value: Any) -> Any:
    """Return another value of a field's type: the next choice, the other bool, twice the number, some value for None.

    Raises:
        ValueError: the type has none that can be guessed.
    """
    name, _, rest = path.partition(".")
    hint = get_type_hints(kind)[name]
    if rest and is_dataclass(hint):
        return other_value(hint, rest, value)  # type: ignore[arg-type]
    if value is None:
        (hint,) = set(get_args(hint)) - {NoneType}
        if get_origin(hint) is not Literal:
            return {int: 2, float: 0.5, str: "other", bool: False}[hint]
        value = get_args(hint)[-1]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return choices[(choices.index(value) + 1) % len(choices)]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    raise ValueError(f"give another value for {path}: none can be guessed from {value!r}")


def setting_effect(
    run: Callable[[C], Any], base: C, path: str, change: Change, folder: Path, known: dict[C, dict[str, Any]]
) -> str:
    """Return the effect of changing `path`: "refused", or the first thing in which the two runs differ.

    `run` is called with configurations whose `run_dir` is set. `known` caches the results of unchanged runs.

    Raises:
        AssertionError: nothing differs, or the refusal does not name the field.
    """
    base = with_values(base, change.both)
    refusal: str | None = None
    try:
        changed = with_value(base, path, change.value)
        new = run_outcome(run, with_value(changed, "run_dir", folder / "changed"))
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        names = (flag(path), path.rpartition(".")[2])
        assert any(name in refusal for name in names), f"{path}: the refusal names neither of {names}: {refusal}"
        return "refused"
    if base not in known:
        known[base] = run_outcome(run, with_value(base, "run_dir", folder / "base"))
    different = [name for name, left in known[base].items() if left != new[name]]
    if different:
        return different[0]
    counts = [
        count_operations(run, with_value(config, "run_dir", folder / f"counted-{name}"))
        for name, config in (("base", base), ("changed", changed))
    ]
    assert counts[0] != counts[1], f"{flag(path)} {change.value!r} has no effect: refuse it, or delete it"
    return "operations"


@dataclass(frozen=True)
class SettingSweep(Generic[C]):
    """All settings of an app, which are changed one at a time.

    `base`: small and quick, with something for every setting to act on. `left_out`: paths that have no flag, or that
    another test changes. `changes`: values where the next choice, the other truth or twice the number would not do.
    """

    run: Callable[[C], Any]
    base: C
    left_out: Set[str]
    changes: Mapping[str, Change]
    known: dict[C, dict[str, Any]] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """Return every setting without those left out and those of `data` and `plugins`, which choose the data."""
        paths = {path for path in field_paths(self.base) if not path.startswith(("data.", "plugins."))} - self.left_out
        unknown = set(self.changes) - paths
        assert not unknown, f"the table names fields that are not there: {unknown}"
        return sorted(paths)

    def equal_runs(self, folder: Path) -> dict[str, Any]:
        """Return what two equal runs leave behind. If they differed, every change would seem to have an effect."""
        one, two = (run_outcome(self.run, with_value(self.base, "run_dir", folder / name)) for name in ("one", "two"))
        assert one == two
        self.known[self.base] = one
        return one

    def effect(self, path: str, folder: Path) -> str:
        """Return the effect of changing one setting; see `setting_effect`."""
        value = functools.reduce(getattr, path.split("."), self.base)
        change = self.changes[path] if path in self.changes else Change(other_value(type(self.base), path, value))
        return setting_effect(self.run, self.base, path, change, folder, self.known)


def run_outcome(run: Callable[[C], Any], config: C) -> dict[str, Any]:
    """Return what a run leaves behind, by name. A ValueError is a refusal and is raised on."""
    run_dir: Path = config.run_dir  # type: ignore[attr-defined]
    ended = "well"
    try:
        run(config)
    except (RuntimeError, ArithmeticError) as error:
        ended = type(error).__name__
    files = {
        str(path.relative_to(run_dir)): path
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and not NOT_COMPARED & set(path.relative_to(run_dir).parts)
    }
    return {
        "ended": ended,
        "metrics": [_without_clock(row) for path in _called("metrics.jsonl", files) for row in _lines(path)],
        "episodes": [row for path in _called("episodes.jsonl", files) for row in _lines(path)],
        "weights": {name: _digest(path) for name, path in files.items() if path.suffix == ".safetensors"},
        "files": list(files),
    }


def count_operations(run: Callable[[C], Any], config: C) -> Counter[str]:
    """Return how often a run carries out each operation on tensors, in this thread."""
    with _Counted() as counted:
        run(config)
    result: Counter[str] = counted.counts
    return result


def field_paths(config: Any) -> list[str]:
    """Return the dotted paths of all fields."""
    return [path for path, _, _ in leaves(config)]


class _Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def _called(name: str, files: Mapping[str, Path]) -> list[Path]:
    return [path for path in files.values() if path.name == name]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _without_clock(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith(CLOCK)}


def _digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=8).hexdigest()


def step_times(step: int, factor: int = 2) -> float:
    """Return a metric of the step's number."""
    return float(factor * step)
