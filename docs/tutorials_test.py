"""The tutorials are programs: their files are written, their commands run in order, and print what the pages show.

Long: the first one trains the model that the others go on with. A command with a name in capitals (DIR, FILE), or of a
GPU, is read and not run.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from apps.grpo.commands import try_environment
from apps.grpo.main import configure
from apps.grpo.main import main as grpo
from apps.sft.main import main as sft
from docs.draw_metrics import meanings, unknown

DOCS = Path(__file__).parent
ORDER = ("first-run", "reward-and-environment", "sft", "gpu")
PART = re.compile(
    r"^```python\n# (\w+\.py)\n(.*?)^```|^```text\n(.*?)^```|^ {4}(python \w+\.py|tessera-[^\n]*)$", re.M | re.S
)
RUNS = ("first", "differences", "second", "talks")
NUMBER = re.compile(r"(?:(?<=\()[+-])?\d[\d.,:]*")  # `(+0.01)`: which way a score moved by chance is a number too
MAINS: dict[str, Callable[[list[str]], object]] = {
    "tessera-grpo": grpo,
    "tessera-sft": sft,
    "tessera-try": try_environment.main,
    "tessera-plan": lambda words: grpo([*words, "--plan"]),
}


@dataclass
class Told:
    """A command of a page, what the page shows of its output, and what it printed."""

    command: str
    shown: list[str] = field(default_factory=list)
    printed: str = ""


def page(name: str) -> str:
    return (DOCS / f"tutorial-{name}.md").read_text(encoding="utf-8")


def is_run(command: str) -> bool:
    """Not one for a machine, or with a model, that is not here."""
    return not re.search(r"\b(DIR|FILE)\b|cuda|^tessera-prepare", command)


def run(command: str) -> str:
    """Run a command in this process, and return what it printed."""
    words, out = shlex.split(command), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        if words[0] == "python":
            runpy.run_path(words[1], run_name="__main__")
        else:
            MAINS[words[0]](words[1:])
    return out.getvalue()


def walk(text: str) -> Iterator[Told]:
    """Yield the commands of a page as they are done; files are written before the commands behind them."""
    told: Told | None = None
    for match in PART.finditer(text):
        if match[1]:
            Path(match[1]).write_text(match[2], encoding="utf-8")
        elif match[3] is not None:
            assert told is not None, match[3]
            told.shown += match[3].splitlines()
        else:
            if told is not None:
                yield told
            told = Told(match[4])
            told.printed = run(match[4]) if is_run(match[4]) else ""
    if told is not None:
        yield told


def missing(told: Told) -> list[str]:
    """Return the lines that a page shows and its command did not print, whatever the numbers are."""

    def plain(line: str) -> str:
        return re.sub(r"\s+", " ", NUMBER.sub("0", line)).strip(" │-+")

    printed = plain(told.printed)
    return [line for line in told.shown if plain(line) not in printed]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[Told]]]:
    """All tutorials in one folder, in their order."""
    folder = tmp_path_factory.mktemp("tutorials")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return folder, {name: list(walk(page(name))) for name in ORDER}


def test_each_tutorial_is_among_them() -> None:
    assert sorted(path.stem for path in DOCS.glob("tutorial-*.md")) == sorted(f"tutorial-{name}" for name in ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_commands_print_what_the_page_shows(name: str, done: tuple[Path, dict[str, list[Told]]]) -> None:
    assert done[1][name]
    for told in done[1][name]:
        assert missing(told) == [], (told.command, told.printed[-3000:])


def test_runs_are_what_the_pages_say(done: tuple[Path, dict[str, list[Told]]]) -> None:
    folder, _ = done
    rows = {name: _rows(folder / name) for name in RUNS}
    assert rows["first"][-1]["step"] == 30
    scores = [row["eval/score"] for row in rows["differences"] if "eval/score" in row]
    assert scores[-1] > scores[0]
    assert max(row.get("train/grad_norm", 0) for row in rows["second"]) > 0
    losses = [row["eval/loss"] for row in rows["talks"] if "eval/loss" in row]
    assert losses[-1] < 0.1 * losses[0]


def test_all_that_they_log_is_on_the_page_of_metrics(done: tuple[Path, dict[str, list[Told]]]) -> None:
    names = {name: "" for run in RUNS for row in _rows(done[0] / run) for name in row}
    assert len(names) > 70
    assert unknown(names, meanings(DOCS.parent)) == []


def test_commands_that_are_not_run_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command line: their flags are there, and go together."""
    monkeypatch.chdir(tmp_path)
    commands = [match[4] for match in PART.finditer(page("gpu")) if match[4] and not is_run(match[4])]
    own = [command for command in commands if command.startswith(("tessera-grpo", "tessera-plan"))]
    assert len(own) >= 5
    for command in own:
        configure(shlex.split(command)[1:])


def _rows(run_dir: Path) -> Sequence[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
