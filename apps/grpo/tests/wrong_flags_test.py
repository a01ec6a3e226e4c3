"""Every wrong flag of a command line is told at once, a line each, whichever parts of the settings they belong to."""

import contextlib
import io
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.common.cli import command_line as cli
from apps.grpo.main import main

WRONG = {
    "--max-steps": "0",
    "--group-size": "0",
    "--logging.groups": "-1",
    "--environment-memory-gib": "0",
    "--environment-processes": "-1",
    "--environment-servers": "x",
    "--max-episode-seconds": "0",
    "--stall-seconds": "0",
    "--eval-share": "2",
    "--digits": "0",
    "--max-prompt-tokens": "0",
    "--system-prompt": " ",
    "--template-options": "x",
    "--tool-format": "no such",
    "--tasks": "x.jsonl",
    "--sampling.temperature": "0",
    "--sampling.max-new-tokens": "0",
    "--objective.clip-low": "2",
    "--objective.kl-coef": "-1",
    "--objective.off-policy-cap": "3",
    "--objective.max-tokens": "3",
    "--warm-start.eval-every": "0",
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
"""A value that its flag can't have, whatever the others are."""


def told(flags: Iterable[str], *more: str) -> list[str]:
    """The lines that the program ends with, with status 2."""
    printed = io.StringIO()
    argv = [word for name in flags for word in (name, WRONG[name])]
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as stop:
        cli.main(lambda: main([*argv, *more]))
    assert stop.value.code == 2
    return printed.getvalue().splitlines()


def assert_all_are_named(flags: Iterable[str], lines: list[str]) -> None:
    for name in flags:
        assert [line for line in lines if re.match(rf"error: {name}(?![-.\w])", line)], (name, lines)
    assert all(line.startswith("error: ") for line in lines)


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(sorted(WRONG)), min_size=1, max_size=6, unique=True), st.sampled_from([(), ("--plan",)])
)
def test_each_of_several_wrong_flags_has_its_line(flags: list[str], more: tuple[str, ...]) -> None:
    lines = told(flags, *more)
    assert_all_are_named(flags, lines)
    assert len(lines) == len(flags)


@pytest.mark.parametrize("more", [(), ("--plan",)])
def test_all_of_them_are_told(more: tuple[str, ...]) -> None:
    lines = told(WRONG, *more)
    assert_all_are_named(WRONG, lines)
    assert len(lines) == len(WRONG)
