"""The committed table of capabilities is the printed one, and each Yes is a test that Bazel runs."""

from pathlib import Path

import pytest

from rollout.capability_table import answers, main
from seqpack.testing.capabilities import assert_committed, assert_tests_are_run

LIBRARY = Path(__file__).parents[1]


def test_the_committed_table_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rollout.vllm")
    assert main() == 0
    printed = capsys.readouterr().out
    assert_committed(printed, LIBRARY)
    assert printed.count("\n| ") > len(answers()["native"])


def test_each_yes_names_a_test_target_that_is_run() -> None:
    pytest.importorskip("rollout.vllm")
    assert_tests_are_run(answers(), LIBRARY)
