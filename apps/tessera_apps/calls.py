"""The apps as Python calls: their flags are keyword arguments, their errors are raised."""

import asyncio
import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from apps.tessera_apps.given import is_given
from runlog.store import read_metrics

if TYPE_CHECKING:  # torch comes with it
    from runplan.report.plan import Plan

App = Literal["grpo", "sft"]
MAINS = {"grpo": "apps.grpo.main", "sft": "apps.sft.main"}
ANSWERS = ("loading", "print_config")
"""Flags that print something and end the program, as `help` and all of `help_...` do: they are for the command line."""


@dataclass(frozen=True)
class RunResult:
    """The result of a run: where it is, and its numbers."""

    run_dir: Path
    metrics: dict[str, Any]
    """The last value of each metric, by name; `step` is the last step's number."""
    export: Path
    """Hugging Face directory of the trained model."""


def grpo(**settings: Any) -> RunResult:
    """Run GRPO (reinforcement learning) with these settings, and return its result.

    The arguments are the flags of `tessera-grpo --help`, with `_` for `-`: `model`, `data`, `run_dir`, ... A flag with
    a dot is in a dict, `rollout={"engine": "vllm"}`. What a flag names by FILE.py:NAME (a reward, an environment, a
    tool) may be given itself: `reward=my_function`.

    Raises:
        ValueError: settings can't be used; the text is that of the command line. Nothing has been trained.
        engines.FailedStepError, RuntimeError: what ends a command with status 1: the run diverged, or trained nothing.
    """
    return _run("grpo", settings)


def sft(**settings: Any) -> RunResult:
    """Run supervised fine-tuning with these settings, and return its result; arguments and errors as in `grpo`."""
    return _run("sft", settings)


def plan(app: App = "grpo", **settings: Any) -> "Plan":
    """Return the plan of a run: memory, time, ranks, and what keeps it from starting (`problems`); it needs no GPU.

    `str()` of it is what `tessera-plan` prints.

    Raises:
        ValueError: as in `grpo`.
    """
    if app not in MAINS:
        raise ValueError(f"there is no app {app!r}: {' or '.join(MAINS)}")
    main, words = import_module(MAINS[app]), _words(app, settings)
    from runplan.report.plan import make_plan  # after main, which sets threads before torch is imported

    words, most = _parse_shrink(main, words)
    config = _configured(main, words)
    return make_plan(main.spec_of(config) if most is None else main.shrunk_spec(config, most))


def _run(app: App, settings: dict[str, Any]) -> RunResult:
    main, words = import_module(MAINS[app]), _words(app, settings)
    words, most = _parse_shrink(main, words)
    config = _configured(main, words)
    _check_ranks(config, words)
    job = partial(main.run, config) if most is None else partial(main.run_shrunk, config, most)
    run_dir = Path(_outside_of_a_loop(job).run_dir)
    return RunResult(run_dir, _last_metrics(run_dir), run_dir / "export")


def _outside_of_a_loop(job: Callable[[], Any]) -> Any:
    """Return what a job returns, from a thread of its own where this one runs an event loop, as notebooks do: a run has
    event loops of its own, and they do not nest. An interrupt waits for that thread; restarting the kernel does not."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return job()
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(job).result()


def _words(app: str, settings: dict[str, Any]) -> list[str]:
    """Return settings as the words of a command line."""
    if wrong := [name for name in settings if name in ANSWERS or name.partition("_")[0] == "help"]:
        raise ValueError(f"{wrong[0]} is of the command line: tessera-{app} --{wrong[0].replace('_', '-')} prints it")
    if settings.get("plan"):
        raise ValueError(f"plan is a call of its own: tessera_apps.plan({app!r}, ...)")
    if settings.get("recipe") == "list":
        raise ValueError(f"tessera-{app} --recipe list prints the recipes: name one of them here")
    line = import_module(MAINS[app]).command_line()
    from apps.tessera_apps.words import words_of  # after main, which sets threads before torch is imported

    return words_of(line, settings)


def _parse_shrink(main: Any, words: list[str]) -> tuple[list[str], Any]:
    parsed: tuple[list[str], Any] = main.parse_shrink_flag(getattr(main, "without_vllm", list)(words))
    return parsed


def _configured(main: Any, words: Sequence[str]) -> Any:
    """Return the configuration; what the command line would print before it ends is the text of a ValueError."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            config = main.configure(words)
    except SystemExit:
        raise ValueError(_without_frame(told.getvalue()) or f"these words end the program: {' '.join(words)}") from None
    sys.stderr.write(told.getvalue())
    return config


def _without_frame(text: str) -> str:
    """Return the lines of an error, without the frame that the parser draws around it."""
    lines = [line.strip(" \u2502").removeprefix("error: ") for line in text.splitlines()]
    return "\n".join(line for line in lines if line.strip("\u256d\u256e\u2570\u256f\u2500 "))


def _check_ranks(config: Any, words: Sequence[str]) -> None:
    """Raise ValueError where several processes would have to load what this process alone has."""
    from engines.launch import runs_in_this_process  # it imports torch

    given = [word for word in words if is_given(word)]
    if given and not (runs_in_this_process(config.nproc_per_node) and not config.cluster.rollout.ray_workers):
        raise ValueError(
            f"{', '.join(word.rpartition(':')[2] for word in given)}: other processes can't load what is made inside "
            "of a function: define it at the top of a module"
        )


def _last_metrics(run_dir: Path) -> dict[str, Any]:
    last: dict[str, Any] = {}
    for row in read_metrics(run_dir):
        last |= row
    return last
