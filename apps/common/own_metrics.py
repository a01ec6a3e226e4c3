"""Metrics of a user's: `--metric FILE.py:NAME`, a function that is called once a step, on rank 0.

It gets what it names of `INPUTS`, and returns a number, which has the function's name, or a mapping from name to
number. Its other arguments are options. What it returns stands in metrics.jsonl and in the report beside the run's own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from seqpack.extensions.load_object import load_object
from seqpack.extensions.options import bound, inputs_of, split_words

INPUTS = ("episodes", "advantages", "tasks", "metrics", "step")
"""What a metric may name: the step's `rollout.Episode`s; the advantage of each; its tasks (`rollout.TaskRow`), one a
group; the step's other metrics by name; and the step's number, from 1. The sft app has the last two."""


def check_metrics(
    specs: Sequence[str], options: Sequence[str], has: Sequence[str] = INPUTS
) -> dict[str, Callable[..., Any]]:
    """Return the functions that specs name, each with the options that it takes, by its spec; `has`: what of `INPUTS`
    the app has.

    Raises:
        ValueError: there is none of a name, it can't be called, names none of these, or no metric takes an option.
    """
    functions = {spec: load_object(spec, "metric") for spec in specs}
    for spec, function in functions.items():
        if not callable(function):
            raise ValueError(f"--metric {spec} is a {type(function).__name__}: a function is needed")
        wanted = inputs_of(function, INPUTS)
        if not wanted or not set(wanted) <= set(has):
            raise ValueError(f"--metric {spec} takes {', '.join(wanted) or 'nothing'}: it may name {', '.join(has)}")
    if options and not functions:
        raise ValueError("--metric-options has no effect without --metric")
    words = split_words(functions, options, INPUTS)
    return {spec: bound("--metric-options", spec, make, words[spec], INPUTS) for spec, make in functions.items()}


def own_metrics(specs: Sequence[str], options: Sequence[str], given: Mapping[str, Any]) -> dict[str, float]:
    """Return what the metrics say of a step; `given`: the values of `INPUTS`.

    Raises:
        ValueError: a result is no number, or has the name of another metric.
    """
    row: dict[str, float] = {}
    for spec, function in check_metrics(specs, options, tuple(given)).items():
        result = function(**{name: given[name] for name in inputs_of(function, tuple(given))})
        values = result if isinstance(result, Mapping) else {spec.rpartition(":")[2]: result}
        for name, value in values.items():
            if name in row or name in given.get("metrics", {}):
                raise ValueError(f"--metric {spec} gave {name!r}, which is a metric already: give another name")
            try:
                row[str(name)] = float(value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"--metric {spec} gave {name!r} as {value!r:.80}: a number is needed") from error
    return row
