"""Names, leftovers, what reaches the disk before what, and systems on which directories cannot change places."""

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.storage import directories
from engines.storage.directories import existing, fresh_temporary, replace_directory, temporary_of


def folder(path: Path, *names: str) -> Path:
    """A directory with files of these names."""
    path.mkdir(parents=True)
    for name in names:
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(name)
    return path


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def test_names_that_later_versions_find(tmp_path: Path) -> None:
    assert temporary_of(tmp_path / "step3") == tmp_path / "step3.writing"
    assert directories._old_of(tmp_path / "step3") == tmp_path / "step3.old"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("aside", [False, True])
def test_the_last_whole_directory(tmp_path: Path, there: bool, aside: bool) -> None:
    target, old = tmp_path / "last", tmp_path / "last.old"
    for path, made in ((target, there), (old, aside)):
        if made:
            folder(path)
    assert existing(target) == (old if aside and not there else target)


def test_what_a_killed_writer_left_is_put_back_or_deleted(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "last"
    assert fresh_temporary(target) == tmp_path / "runs" / "last.writing"
    assert names(tmp_path) == ["runs", "runs/last.writing"]
    folder(tmp_path / "runs" / "last.old", "whole")
    (tmp_path / "runs" / "last.writing" / "half").touch()
    fresh_temporary(target)
    assert names(tmp_path / "runs") == ["last", "last.writing", "last/whole"]
    folder(tmp_path / "runs" / "last.old", "replaced")
    fresh_temporary(target)
    assert names(tmp_path / "runs") == ["last", "last.writing", "last/whole"]


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The renames, exchanges and synced files, in order."""
    seen: list[tuple[str, ...]] = []

    def rename(source: Path, target: Path, real: Callable[[Path, Path], None] = os.rename) -> None:
        seen.append(("rename", source.name, target.name))
        real(source, target)

    def exchange(one: Path, other: Path, real: Callable[[Path, Path], bool] = directories._exchange) -> bool:
        seen.append(("exchange", one.name, other.name))
        return real(one, other)

    def fsync(handle: int, real: Callable[[int], None] = os.fsync) -> None:
        seen.append(("fsync", os.readlink(f"/proc/self/fd/{handle}").rpartition("/")[2]))
        real(handle)

    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(directories, "_exchange", exchange)
    return seen


@pytest.mark.parametrize("how", ["new", "exchange", "renames"])
def test_all_of_it_is_on_the_disk_before_it_is_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operations: list[tuple[str, ...]], how: str
) -> None:
    target = tmp_path / "last"
    source = folder(temporary_of(target), "a", "room/b")
    if how != "new":
        folder(target, "old")
    if how == "renames":
        monkeypatch.setattr(directories, "_exchange", lambda one, other: False)
    handles = len(os.listdir("/proc/self/fd"))
    replace_directory(source, target)
    assert names(tmp_path) == ["last", "last/a", "last/room", "last/room/b"]
    assert len(os.listdir("/proc/self/fd")) == handles
    moves = {
        "new": [("rename", "last.writing", "last")],
        "exchange": [("exchange", "last.writing", "last")],
        "renames": [("rename", "last", "last.old"), ("rename", "last.writing", "last")],
    }[how]
    synced = {("fsync", name) for name in ("a", "room", "b", "last.writing")}
    assert set(operations[:4]) == synced
    assert operations[4:] == [*moves, ("fsync", tmp_path.name)]


def test_directories_of_the_working_directory_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "a", "of a")
    folder(tmp_path / "b", "of b")
    monkeypatch.chdir(tmp_path)
    assert directories._exchange(Path("a"), Path("b"))
    assert (names(tmp_path / "a"), names(tmp_path / "b")) == (["of b"], ["of a"])


def failing(number: int) -> SimpleNamespace:
    """A C library whose renameat2 fails."""

    def renameat2(*_: Any) -> int:
        ctypes.set_errno(number)
        return -1

    return SimpleNamespace(renameat2=renameat2)


@pytest.mark.parametrize(
    "library",
    [SimpleNamespace(), *map(failing, (errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EOPNOTSUPP))],
)
def test_a_system_that_cannot_exchange_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: SimpleNamespace
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: library)
    assert directories._exchange(tmp_path / "a", tmp_path / "b") is False


def test_another_error_is_raised_with_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: failing(errno.EACCES))
    with pytest.raises(PermissionError) as caught:
        directories._exchange(tmp_path / "a", tmp_path / "b")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / "a"), str(tmp_path / "b"))
