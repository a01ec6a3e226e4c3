"""What a command line names and is not there is told at once, all of it; what a model may refuse is left to the run."""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.common.cli import command_line as cli
from apps.common.cli.flags import SettingsError
from apps.common.data.missing_model import is_missing
from apps.grpo import first_look as grpo_look
from apps.grpo import main as grpo
from apps.sft import first_look as sft_look
from apps.sft import main as sft

LOOKS: dict[str, tuple[Callable[[Sequence[str]], Any], Callable[[Any, Path], AbstractContextManager[None]]]] = {
    "grpo": (grpo.configure, grpo_look.look),
    "sft": (sft.configure, sft_look.look),
}


def told(app: str, *argv: str) -> list[str]:
    """The lines of a first look at a command line."""
    configure, look = LOOKS[app]
    try:
        with look(configure(argv), Path("runs")):
            pass
    except SettingsError as error:
        return list(error.lines)
    return []


@pytest.fixture
def rows(tmp_path: Path) -> str:
    """A file of which the apps can use no row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": 1}) + "\n")
    return str(path)


@pytest.mark.parametrize("app", LOOKS)
def test_all_that_is_missing_is_told_together(app: str, rows: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    files = ["--model", str(tmp_path / "no-model"), "--data", "nowhere.jsonl", "--eval-data", rows]
    own = ["--reward", f"{tmp_path}/nowhere.py:f"] if app == "grpo" else []
    lines = told(app, *files, "--run-dir", str(tmp_path), *own)
    texts = ["there is no file"] * len(own[:1])
    texts += ["no model directory", "holds a run already", "no such data file", "line 1: no column"]
    assert [text for text in texts if not any(text in line for line in lines)] == []
    assert len(lines) == len(texts)


@pytest.mark.parametrize("app", LOOKS)
def test_a_model_that_is_not_named_is_told_with_the_data(app: str) -> None:
    lines = told(app, "--data", "nowhere.jsonl")
    assert "add --model" in lines[0]
    assert "no such data file" in lines[1]


MISSING = "error: no such data file: nowhere.jsonl"


@pytest.mark.parametrize("app", LOOKS)
@pytest.mark.parametrize("more", ["--parallel.expert 2 --nproc-per-node 2", "--trainer.device cpu"])
@pytest.mark.parametrize("rest", [(), ("too many experts",), ("no such device", "too many experts")])
def test_what_the_model_or_the_machine_may_refuse_is_told_after_it(
    app: str, more: str, rest: Sequence[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line once, and the program ends as for any other error."""
    configure, look = LOOKS[app]
    config = configure(["--model", str(tmp_path), "--data", "nowhere.jsonl", *more.split()])
    before: list[str] = []

    def refused() -> None:
        with look(config, Path("runs")):
            before.extend(capsys.readouterr().err.splitlines())
            raise SettingsError([*rest, MISSING.removeprefix("error: ")])

    with pytest.raises(SystemExit) as stop:
        cli.main(refused)
    assert stop.value.code == 2
    assert [line for line in before if line.startswith("error: ")] == [MISSING]
    assert capsys.readouterr().err.splitlines() == [f"error: {line}" for line in rest]


@pytest.mark.parametrize("app", LOOKS)
def test_files_that_are_there_are_not_read(app: str, rows: str, tmp_path: Path) -> None:
    assert told(app, "--model", str(tmp_path), "--data", rows) == []


def test_a_name_of_the_hub_is_not_missing(tmp_path: Path) -> None:
    assert not is_missing(Path("owner/name"))
    assert not is_missing(None)
    assert not is_missing(tmp_path)
    assert is_missing(Path("nowhere"))
    assert is_missing(tmp_path / "none")
    assert is_missing(Path("a/b/c"))


@pytest.mark.parametrize("app", LOOKS)
def test_a_resumed_run_is_left_to_its_own_checks(app: str, tmp_path: Path) -> None:
    configure, look = LOOKS[app]
    config = replace(configure(["--model", str(tmp_path), "--data", "nowhere.jsonl"]), resume=True)
    with look(config, Path("runs")):
        pass
