"""What a program says of flags whose values can't be, for the tests of each app."""

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest

from apps.common.cli import command_line as cli

WRONG = {
    "--max-steps": "0",
    "--learning-rate": "nan",
    "--trainer.eps": "0",
    "--parallel.context": "ring",
    "--trainer.logit-chunk": "0",
    "--lora.rank": "-1",
    "--lora.alpha": "0",
    "--pools.nodes": "0",
    "--pools.device-memory-gib": "0",
    "--rollout.tensor-parallel": "0",
    "--rollout.gpu-memory-utilization": "1",
    "--rollout.vllm": "x",
    "--schedule.required-batches": "0",
    "--schedule.staleness-threshold": "-1",
    "--media.images-column": "",
    "--env": "x",
}
"""A value that a flag of both apps can't have, whatever the others are."""


def assert_each_is_reported(
    main: Callable[[Sequence[str]], None], wrong: Mapping[str, str], flags: Iterable[str], more: Iterable[str]
) -> None:
    """Assert that `main` ends with status 2 and a line for each of the `flags` with their `wrong` values, and no other.

    `more`: words behind them.
    """
    flags, printed = list(flags), io.StringIO()
    argv = [word for name in flags for word in (name, wrong[name])]
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as stop:
        cli.main(lambda: main([*argv, *more]))
    assert stop.value.code == 2
    lines = printed.getvalue().splitlines()
    for name in flags:
        assert [line for line in lines if re.match(rf"error: {name}(?![-.\w])", line)], (name, lines)
    assert all(line.startswith("error: ") for line in lines)
    assert len(lines) == len(flags)
