"""Objects by name: found once, and whatever is missing is named with what to write instead."""

import hashlib
import re
import sys
import zipfile
from pathlib import Path

import pytest

from seqpack.extensions.load_object import absolute_spec, file_hash, load_object

SOURCE = """
import neighbour
count = neighbour.count
class Game:
    board = [1]
def reward(reply, results):
    return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(SOURCE)
    (tmp_path / "neighbour.py").write_text("count = [0]\n")
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    return tmp_path


def test_a_file_is_imported_once_and_finds_its_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reward = load_object(f"{folder}/mine.py:reward", "reward")
    assert reward(None, ()) == 1.0
    monkeypatch.chdir(folder)
    assert load_object("mine.py:reward", "reward") is reward
    assert load_object("mine.py:Game.board", "environment", list) == [1]
    assert sys.modules[reward.__module__].reward is reward


def test_files_of_one_name_are_two_modules(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "mine.py").write_text("def reward(): return 2\n")
    assert load_object(f"{folder}/other/mine.py:reward", "reward")() == 2
    assert load_object(f"{folder}/mine.py:reward", "reward")(None, ()) == 1.0


def test_a_module_by_its_dotted_name() -> None:
    assert load_object("seqpack.extensions.load_object:load_object", "environment") is load_object


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mine.py", "'mine.py' is not FILE.py:NAME or package.module:name"),
        (":reward", "is not FILE.py:NAME"),
        ("mine.py:", "is not FILE.py:NAME"),
        ("nowhere.py:reward", r"no file .*nowhere.py for --reward: give its path from"),
        ("mine.py:rewrd", r"has no 'rewrd' for --reward; did you mean reward\?"),
        ("mine.py:zzz", r"has no 'zzz' for --reward; it has Game, reward"),
        ("mine.py:Game.x", "has no 'x'"),
        ("no_such_package.part:reward", "no module 'no_such_package' for --reward: install"),
        ("seqpack.no_such_module:reward", "no module 'seqpack.no_such_module'"),
        ("mine.py:count", "is a list; a str or dict is needed"),
    ],
)
def test_what_is_missing_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, spec: str, message: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message):
        load_object(spec, "reward", (str, dict))


@pytest.mark.parametrize(
    ("source", "line", "message"),
    [
        (
            "import no_such_package\n",
            1,
            "ModuleNotFoundError: No module named 'no_such_package'",
        ),
        ("x = 1\ndef reward()\n    return 1\n", 2, "SyntaxError: expected ':'"),
        ("def f():\n    return unknown\n\nf()\n", 2, "NameError: name 'unknown' is not defined"),
        ("import json\njson.loads('{')\n", 2, "JSONDecodeError: "),
    ],
)
def test_errors_of_the_users_code_name_file_and_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, source: str, line: int, message: str
) -> None:
    broken = folder / "broken.py"
    broken.write_text(source)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ValueError, match=re.escape(f"--reward: {broken}, line {line}: {message}")):
        load_object(f"{broken}:reward", "reward")
    if "json" not in source:  # of a module the deepest line is named
        with pytest.raises(ValueError, match=re.escape(f"{broken}, line {line}: {message}")):
            load_object("broken:reward", "reward")
    broken.write_text("reward = 3\n")
    assert load_object(f"{broken}:reward", "reward", int) == 3


def test_a_file_has_a_hash_and_a_whole_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert file_hash("mine.py:reward") == hashlib.sha256(SOURCE.encode()).hexdigest()
    assert absolute_spec("mine.py:reward") == f"{folder}/mine.py:reward"
    assert absolute_spec("package.module:reward") == "package.module:reward"


def test_a_module_in_a_zip_file_has_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel on the path is one."""
    with zipfile.ZipFile(tmp_path / "own.whl", "w") as file:
        file.writestr("zipped_reward.py", SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path / "own.whl"))
    assert file_hash("zipped_reward:reward") is None  # not loaded
    load_object("zipped_reward:reward", "reward")
    assert file_hash("zipped_reward:reward") == hashlib.sha256(SOURCE.encode()).hexdigest()
