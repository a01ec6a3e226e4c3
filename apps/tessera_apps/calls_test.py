"""The Python calls tell what the command line tells, and plan without running."""

import re

import pytest

from apps.common.cli import command_line as cli
from apps.grpo import main as grpo_main
from apps.tessera_apps import grpo, plan

WRONG = [
    (["--group-sise", "4"], {"group_sise": 4}),
    (["--group-size", "many"], {"group_size": "many"}),
    (["--recipe", "quickstrat"], {"recipe": "quickstrat"}),
    (["--eval-share", "2", "--digits", "0"], {"eval_share": 2, "digits": 0}),
    (["--model", "nowhere"], {"model": "nowhere"}),
]


def words(text: str) -> list[str]:
    """The words of a message, without the frame that the parser draws and what it breaks lines by."""
    return re.findall(r"[\w./-]+", text.replace("error: ", ""))


@pytest.mark.parametrize(("argv", "settings"), WRONG)
def test_errors_are_those_of_the_command_line(
    argv: list[str], settings: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(lambda: grpo_main.main(argv))
    told = capsys.readouterr().err
    with pytest.raises(ValueError) as raised:
        grpo(**settings)
    said = capsys.readouterr().err  # the recipe that a flag decides on, which is no error
    assert told.startswith(said)
    told = told.removeprefix(said)
    assert words(str(raised.value)) == words(told)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"print_config": True}, "is of the command line"),
        ({"plan": True}, "a call of its own"),
        ({"recipe": "list"}, "name one of them"),
        ({"reward": lambda reply: 1.0, "data": "x.jsonl", "nproc_per_node": 2}, "other processes can't load"),
    ],
)
def test_what_a_call_can_not_do_is_refused(settings: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        grpo(**settings)


def test_a_plan_is_that_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan("sft", recipe="quickstart")
    assert made.problems == []
    assert "./bazelw run //apps/sft -- --recipe quickstart" in str(made)
    with pytest.raises(ValueError, match="there is no app 'dpo'"):
        plan("dpo")  # type: ignore[arg-type]
