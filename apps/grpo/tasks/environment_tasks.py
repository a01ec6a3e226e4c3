"""The tasks of environments that a user brings: their rows, the environment of each row, and the prompts of a step.

1. An environment whose factory has `rows()` (a taskset of verifiers, say) brings its tasks. For others `--tasks FILE`
   holds rows; with several environments a column names the environment of each row. Without a file tasks are numbered,
   and an environment draws what it needs from its seed.
2. Of each environment's rows a share is held out, by their content.
3. A step's prompts are divided among the environments by their shares (by default: as many as they have rows), so that
   after every step each has had its share of all prompts so far, to within one.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from apps.common.cli.flags import flag
from apps.common.data.files import data_files
from apps.common.data.held_out import held_out_keys
from apps.common.data.rows import named, read_rows
from apps.common.own_tasks import OwnTasks
from apps.common.plugins import environment_loader, environment_name, load_environment
from apps.common.tasks import Tasks
from apps.grpo.config import DataConfig, GrpoConfig
from rollout import RowSource, TaskRow, TaskSource
from rollout.environments.mixed_tasks import EnvironmentPart, EnvironmentTasks, HeldOutTasks, NumberedTasks


def make_environment_tasks(settings: GrpoConfig, wrap: Callable[[Any], Any] | None = None) -> Tasks:
    """Return the tasks of the environments, or the source, that the configuration names; `wrap` is applied to each
    factory.

    Raises:
        ValueError: an environment, a file, a column or a share can't be used.
    """
    own = settings.plugins
    if not own.environment and own.task_source is None:
        raise ValueError(
            f"recipe {settings.recipe!r} plays environments of your own: add --environment FILE.py:NAME, or "
            "--task-source FILE.py:NAME with environments of its own"
        )
    for option in fields(DataConfig):
        if option.name not in ("eval_prompts", "eval_share") and getattr(settings.data, option.name) != option.default:
            raise ValueError(f"{flag('data.' + option.name)} has no effect with --environment: leave it out")
    if not own.environment:
        return _own_tasks(settings)
    names = [environment_name(spec) for spec in own.environment]
    if len(set(names)) < len(names):
        raise ValueError(
            f"two environments have one name ({', '.join(names)}): give them different names in their files"
        )
    brought = {name: _brought(spec) for name, spec in zip(names, own.environment, strict=True)}
    others = [name for name in names if brought[name] is None]
    load = environment_loader(own.environment, own.environment_options)
    if own.task_source is not None:
        return EnvironmentTasks([_own_part(settings, names, others)], load, wrap)
    if own.tasks is not None and not others:
        raise ValueError(f"--tasks has no effect: {', '.join(names)} bring tasks of their own; leave it out")
    if own.tasks is None and others and settings.data.eval_share != DataConfig.eval_share:
        raise ValueError("--eval-share has no effect without --tasks: numbered tasks have no end; use --eval-prompts")
    filed = {} if own.tasks is None else _rows_by_name(own.tasks, others, own.environment_column)
    rows = {name: brought[name] or filed.get(name) for name in names}
    shares = _shares(own.environment_shares, names, [len(found) if found else 1 for found in rows.values()])
    parts = [
        EnvironmentPart(name, spec, _source(settings, name, rows[name], share), share)
        for name, spec, share in zip(names, own.environment, shares, strict=True)
    ]
    return EnvironmentTasks(parts, load, wrap)


def _own_tasks(settings: GrpoConfig) -> OwnTasks:
    """Return the tasks of the source that a configuration names."""
    own, inputs = settings.plugins, {"seed": settings.seed, "held_out": settings.data.eval_prompts}
    assert own.task_source is not None
    return OwnTasks.of(own.task_source, own.task_source_options, inputs, own.system_prompt, bool(own.environment))


def _own_part(settings: GrpoConfig, names: Sequence[str], others: Sequence[str]) -> EnvironmentPart:
    """Return the one environment of a run with the tasks of a source of the user's."""
    own = settings.plugins
    if len(names) > 1 or not others:
        raise ValueError("--task-source goes with one environment, which brings no tasks of its own")
    return EnvironmentPart(names[0], own.environment[0], _own_tasks(settings), 1.0)


def _brought(spec: str) -> list[TaskRow] | None:
    """Return the tasks that an environment brings, or None; raise ValueError for an empty list."""
    factory = load_environment(spec)
    if inspect.isclass(factory) and inspect.isfunction(inspect.getattr_static(factory, "rows", None)):
        return None  # a method of its episodes
    rows = getattr(factory, "rows", None)
    tasks = None if rows is None else rows()
    if tasks is not None and not tasks:
        raise ValueError(f"--environment {spec} brings no tasks: its rows() is empty")
    return tasks


def _rows_by_name(path: Path, names: Sequence[str], column: str) -> dict[str, list[TaskRow]]:
    """Return the file's rows by environment; a row's id is its number, from 1."""
    rows_of: dict[str, list[TaskRow]] = {name: [] for name in names}
    read = [(named(file, number), row) for file in data_files(path) for number, row in read_rows(file)]
    for count, (place, row) in enumerate(read, start=1):
        name = names[0] if len(names) == 1 and column not in row else row.get(column)
        if name not in rows_of:
            said = f"has no column {column!r}" if name is None else f"is for the environment {name!r}"
            raise ValueError(f"{place} {said}: --environment-column names the one of {', '.join(names)} that it is for")
        rows_of[name].append(TaskRow(f"row-{count}", row))
    for name, rows in rows_of.items():
        if not rows:
            raise ValueError(f"{path} has no row for the environment {name!r}: leave it out")
    return rows_of


def _source(settings: GrpoConfig, name: str, rows: Sequence[TaskRow] | None, share: float) -> TaskSource:
    """Return a source of the rows, all held out where none trains, or of numbered tasks; held-out rows are chosen by
    their data, or by their ids where they have none."""
    if rows is None:
        return NumberedTasks(name, settings.data.eval_prompts)
    if not share:
        return HeldOutTasks(name, tuple(rows[: settings.data.eval_prompts]))
    keys = [json.dumps(row.data, sort_keys=True, default=str) if row.data else row.id for row in rows]
    chosen = held_out_keys(keys, settings.data.eval_share, settings.data.eval_prompts)
    sides: tuple[list[TaskRow], list[TaskRow]] = ([], [])
    for key, row in zip(keys, rows, strict=True):
        sides[key in chosen].append(row)
    train, held_out = sides
    if not train:
        raise ValueError(f"the {len(rows)} tasks for {name!r} are too few to hold some of them out")
    return RowSource(name, train, held_out[: settings.data.eval_prompts], settings.seed)


def _shares(words: Sequence[str], names: Sequence[str], sizes: Sequence[int]) -> list[float]:
    """Return each environment's share: from NAME=SHARE words, else by its number of rows; they add up to 1."""
    weights: dict[str, float] = dict(zip(names, map(float, sizes), strict=True))
    if words:
        named: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition("=")
            try:
                named[name] = float(text)
            except ValueError:
                named[name] = -1.0
            if not 0 <= named[name] < float("inf"):
                raise ValueError(f"--environment-shares {word!r} is not NAME=NUMBER with a number of at least 0")
        if set(named) != set(names):
            raise ValueError(f"--environment-shares names {', '.join(named)}; give one for each of {', '.join(names)}")
        if not any(named.values()):
            raise ValueError("--environment-shares leaves nothing to train: give one environment a share above 0")
        weights = named
    total = sum(weights.values())
    return [weights[name] / total for name in names]
