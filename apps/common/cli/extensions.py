"""The twelve choices that take code of a user's, FILE.py:NAME or package.module:NAME, with options of its own.

`POINTS` says of each where the configuration holds its name and its options, and what it gets and returns. `own_code`
lists what a configuration names; a run directory keeps it in `own_code.json`: the file, its SHA-256, the options with
their types read. Pickled settings hold names alone: every process loads the code by its name when it needs it.
"""

import inspect
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Any, get_type_hints

from apps.common.cli.flags import flag
from apps.common.cli.values import with_values
from seqpack.extensions.load_object import absolute_spec, file_hash, file_of, is_user_code, load_object
from seqpack.extensions.options import REQUIRED, options_of, read_options

OWN_CODE = "own_code.json"


@dataclass(frozen=True)
class Point:
    """One choice: its name, the paths of its name and options in a configuration, and its protocol."""

    kind: str
    path: str
    options: str
    protocol: str
    inputs: tuple[str, ...] = ()
    """Names of arguments that are no options."""
    first: int = 0
    """How many arguments it gets by position."""
    others: tuple[tuple[str, str], ...] = ()
    """The paths of name and options where another app has others."""


POINTS = (
    Point(
        "advantage", "advantage", "advantage_options",
        "a function of rewards f[B], groups i64[B] (equal numbers are responses to one prompt), response_length i64[B] "
        "or batch, as many as it names; returns f[B], one number a response, or jagged (B, j), one a token",
        ("rewards", "groups", "response_length", "batch"),
    ),
    Point(
        "loss", "objective.policy_loss", "objective.policy_loss_options",
        "a function of tokens: log_probs, old_log_probs, advantages f32[T], mask bool[T], batch (cu_seqlens i32[n+1]); "
        "returns f32[T], the loss of each token, or TokenLoss(loss, {name: [T]}); only log_probs has a gradient",
        first=1, others=(("objective.loss", "objective.loss_options"),),
    ),
    Point(
        "reward", "plugins.reward", "plugins.reward_options",
        "a function of reply, reference, row, results, end, as many as it names; returns a number or a rollout.Score",
        ("reply", "reference", "row", "results", "end"),
    ),
    Point(
        "environment", "plugins.environment", "plugins.environment_options",
        "a class, or what makes one episode: async open(context), step(reply), finish(end), close()",
    ),
    Point(
        "tool", "plugins.tool", "plugins.tool_options",
        "a rollout.Tool, a function that makes one, or a function with typed arguments, which the model calls",
    ),
    Point(
        "task-source", "plugins.task_source", "plugins.task_source_options",
        "a class or function of seed and held_out, as many as it names; gives tasks(step, count) and held_out(), lists "
        "of rollout.TaskRow, and environment(row) unless --environment plays them",
        ("seed", "held_out"),
    ),
    Point("recipe", "recipe", "recipe_options", "a Recipe of the app, or a function that makes one"),
    Point(
        "sampler", "cluster.rollout.engine", "cluster.rollout.engine_options",
        "a class derived from schedules.SamplerBackend: build(config, model, version) and dtype(config, model, engine)",
    ),
    Point(
        "schedule", "cluster.schedule.mode", "cluster.schedule.options",
        "a class or function of parts (schedules.registry.ScheduleParts); gives a context manager with step(step), "
        "evaluate(), saving(step), saved(step)",
        first=1,
    ),
    Point(
        "metric", "metric", "metric_options",
        "a function of episodes, advantages, tasks, metrics, step, as many as it names; returns a number, or several "
        "as {name: number}",
        ("episodes", "advantages", "tasks", "metrics", "step"),
    ),
    Point(
        "model-family", "engine.family", "engine.family_options",
        "an engines.families.family.Family, or a function that makes one; it is proven when the model is opened",
    ),
    Point(
        "tool-format", "plugins.tool_format", "plugins.tool_format_options",
        "a chat_tools.Format, or a function that makes one",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class OwnCode:
    """Code of a user's that a configuration names."""

    kind: str
    name: str
    options: dict[str, Any]
    """All options, with the values that hold."""
    file: str | None
    sha256: str | None

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        digest = f", sha256 {self.sha256[:12]}" if self.sha256 else ""
        return f"{self.kind} {self.name}({options}){digest}"


def points_of(config: Any) -> Iterator[Point]:
    """Yield the points that an app's configuration, or its class, has."""
    yield from _points_of(config if isinstance(config, type) else type(config))


@lru_cache(maxsize=16)
def _points_of(kind: type) -> tuple[Point, ...]:
    return tuple(
        replace(point, path=path, options=options)
        for point in POINTS
        for path, options in ((point.path, point.options), *point.others)
        if _has(kind, path) and _has(kind, options)
    )


def named(config: Any, point: Point) -> tuple[str, ...]:
    """Return the specs of user code that a configuration names at a point."""
    value = attrgetter(point.path)(config)
    values = value if isinstance(value, tuple) else (value,)
    return tuple(one for one in values if is_user_code(one) and not one.startswith("mcp:"))


def own_code(config: Any) -> list[OwnCode]:
    """Return the code of a user's that a configuration names.

    Raises:
        ValueError: it can't be loaded, or does not take its options.
    """
    codes = []
    for point in points_of(config):
        words = attrgetter(point.options)(config)
        for spec in named(config, point):
            target = load_object(spec, point.kind)
            values = _values(point, target, words)
            file = file_of(spec)
            codes.append(OwnCode(point.kind, spec, values, None if file is None else str(file), file_hash(spec)))
    return codes


def absolute_names(config: Any) -> Any:
    """Return the configuration whose FILE.py:NAME are whole paths, which other processes and a resumed run find."""
    values: dict[str, Any] = {}
    for point in points_of(config):
        value = attrgetter(point.path)(config)
        if isinstance(value, tuple):
            values[point.path] = tuple(absolute_spec(one) if is_user_code(one) else one for one in value)
        elif is_user_code(value):
            values[point.path] = absolute_spec(value)
    return with_values(config, values)


def write_own_code(config: Any, run_dir: Path) -> list[str]:
    """Write what code a run has into its directory, and return a line for each file that differs from the last start's.

    Each start is an entry: a resumed run adds one where code or options are others.
    """
    path, here = run_dir / OWN_CODE, [asdict(one) for one in own_code(config)]
    starts: list[list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    here = json.loads(json.dumps(here, default=str))
    if (not here and not starts) or (starts and starts[-1] == here):
        return []
    part = path.with_suffix(".writing")
    part.write_text(json.dumps([*starts, here], indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)
    before = {one["name"]: one for one in starts[-1]} if starts else {}
    return [
        f"--{one['kind']} {one['name']}: its {what} changed since the run's last start"
        for one in here
        if one["name"] in before
        for what, key in (("file", "sha256"), ("options", "options"))
        if before[one["name"]][key] != one[key]
    ]


def tell_own_code(config: Any, run_dir: Path) -> None:
    """Write what code a run has into its directory, and tell it, with what differs from the run's last start."""
    changes = write_own_code(config, run_dir)
    sys.stdout.write("".join(f"{line}\n" for line in (*map(str, own_code(config)), *changes)))
    sys.stdout.flush()


def load_own_code(config: Any) -> None:
    """Import all code of a user's that a configuration names: what is unpickled after it may be of its classes."""
    for point in points_of(config):
        for spec in named(config, point):
            load_object(spec, point.kind)


def help_of(kind: str, config: Any, spec: str | None = None) -> str:
    """Return the help of a point: what its code gets and returns, its flags, and the options of `spec`.

    Raises:
        ValueError: there is no such point, or the code can't be loaded.
    """
    points = {point.kind: point for point in points_of(config)}
    if kind not in points:
        raise ValueError(f"--help-{kind}: there are {', '.join(f'--help-{known}' for known in points)}")
    point = points[kind]
    lines = [
        f"{flag(point.path)} NAME, FILE.py:NAME or package.module:NAME",
        f"{flag(point.options)} NAME=VALUE ...",
        f"It is {point.protocol}.",
    ]
    if spec is not None and is_user_code(spec):
        target = load_object(spec, kind)
        options = options_of(target, point.inputs, point.first) if callable(target) else ()
        lines.append(f"Options of {spec}: {', '.join(map(str, options)) or 'none'}")
    return "\n".join(lines) + "\n"


def _values(point: Point, target: Any, words: Sequence[str]) -> dict[str, Any]:
    """Return the options of user code with the values that words give them; other checks refuse wrong words."""
    if not (inspect.isclass(target) or inspect.isroutine(target)):
        return {}  # made already: an object has no options, also where it is called (an agent)
    options = {option.name: option for option in options_of(target, point.inputs, point.first)}
    own = [word for word in words if word.partition("=")[0] in options]
    if not own and any(option.default is REQUIRED for option in options.values()):
        return {}  # a tool that the model calls with them
    given = read_options(flag(point.options), point.kind, target, own, point.inputs, point.first)
    return {name: given.get(name, option.default) for name, option in options.items()}


def _has(kind: Any, path: str) -> bool:
    for part in path.split("."):
        hints = get_type_hints(kind) if isinstance(kind, type) else {}
        if part not in hints:
            return False
        kind = hints[part]
    return True


def lines_of(codes: Iterable[OwnCode]) -> tuple[str, ...]:
    """Return a line for each, for a plan and the terminal."""
    return tuple(map(str, codes))
