"""A change in a package's folder stamps that package and no other, and taking it back takes the stamp away."""

import importlib.util
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hub_look
import install_hub
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

PACKAGES = ("one", "one_more", "other")
FILES = {
    "__init__.py": "A = 1\n",
    "inner/deep.py": "B = 2\n",
    "data.txt": "words\n",
    "inner/no_python.py": "{% template %}\n",
}


def installed(hub: Path) -> Path:
    """A hub of small packages."""
    for package in PACKAGES:
        for name, text in FILES.items():
            path = hub / package / install_hub.SITE / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".py":
                install_hub.compile_source(hub, path)
    (hub / "wheels").mkdir(parents=True)
    (hub / "wheels/one.whl").write_bytes(b"PK")
    hub_look.remember(hub)
    return hub


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    return installed(tmp_path / "hub")


def stamps(hub: Path) -> dict[str, str]:
    """The stamp of each package that has one, after a look."""
    hub_look.look_and_stamp(hub)
    found = [*hub.glob(f"*/{hub_look.STAMP}"), *hub.glob(hub_look.STAMP)]
    return {str(path.parent.relative_to(hub)): path.read_text() for path in found}


def contents(hub: Path, package: str) -> dict[str, tuple[bytes, bool] | str | None]:
    """What lies in a package's folder, byte code aside."""
    site = hub / package / install_hub.SITE
    found: dict[str, tuple[bytes, bool] | str | None] = {}
    for path in site.rglob("*"):
        if "__pycache__" in path.parts:
            continue
        name = str(path.relative_to(site))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return found


def in_place(path: Path) -> None:
    """Other bytes of the same length, and times as before."""
    times = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def by_another_file(path: Path) -> None:
    """As editors save."""
    part = path.with_name("saved")
    part.write_text(path.read_text() + "C = 3\n")
    part.rename(path)


def by_link(path: Path) -> None:
    """Another kind of file by the same name."""
    path.unlink()
    path.symlink_to("elsewhere.py")


def by_folder(path: Path) -> None:
    """Another kind of file by the same name."""
    path.unlink()
    path.mkdir()


def by_new_package(path: Path) -> None:
    """A file in a folder that was not there."""
    (path.parent / "new").mkdir()
    (path.parent / "new/__init__.py").touch()


CHANGES: dict[str, Callable[[Path], object]] = {
    "longer": lambda path: path.write_text(path.read_text() + "# more\n"),
    "in place": in_place,
    "by another file": by_another_file,
    "removed": lambda path: path.unlink(),
    "renamed": lambda path: path.rename(path.with_name("renamed.py")),
    "a link": by_link,
    "a folder": by_folder,
    "a program": lambda path: path.chmod(0o755),
    "one more": lambda path: path.with_name("new.py").write_text("N = 1\n"),
    "in a new folder": by_new_package,
    "its folder renamed": lambda path: path.parent.rename(path.parent.with_name("elsewhere")),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_stamps_its_package_alone_and_once(hub: Path, change: str, name: str) -> None:
    assert stamps(hub) == {}
    CHANGES[change](hub / "one_more" / install_hub.SITE / "one_more" / name)
    changed = stamps(hub)
    assert changed.keys() == {"one_more"}
    seen = (hub / hub_look.SEEN).read_bytes()
    assert seen == hub_look.listing(hub)
    assert stamps(hub) == changed


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PACKAGES), st.integers(0, 2**32)), max_size=6))
def test_a_stamp_says_what_the_folder_holds(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, int]]
) -> None:
    """Any run of changes, a look after some: no stamp where all is as installed, else one for each set of contents."""
    hub = installed(tmp_path_factory.mktemp("hub") / "hub")
    original = {package: contents(hub, package) for package in PACKAGES}
    known: dict[str, list[tuple[object, str | None]]] = {package: [(original[package], None)] for package in PACKAGES}
    for package, seed in edits:
        chosen = random.Random(seed)
        site = hub / package / install_hub.SITE
        files = sorted(path for path in site.rglob("*.*") if path.is_file() and path.suffix in (".py", ".txt"))
        if files:
            try:
                chosen.choice([*CHANGES.values()])(chosen.choice(files))
            except OSError:
                continue
        if chosen.random() < 0.5:
            check_stamps(hub, known)
    check_stamps(hub, known)


def check_stamps(hub: Path, known: dict[str, list[tuple[object, str | None]]]) -> None:
    """Two contents have the same stamp exactly where they are the same; byte code is that of the sources."""
    found = stamps(hub)
    for package, before in known.items():
        now = contents(hub, package)
        for content, stamp in before:
            assert (content == now) == (stamp == found.get(package))
        before.append((now, found.get(package)))
        for source in (hub / package).rglob("*.py"):
            cached = Path(importlib.util.cache_from_source(str(source)))
            assert not cached.exists() or hub_look.fits(hub, source, cached)


def test_what_is_taken_back_leaves_the_very_bytes_of_the_installation(hub: Path) -> None:
    before = {path: path.read_bytes() for path in hub.rglob("*") if path.is_file() and path.name != hub_look.SEEN}
    package = hub / "one" / install_hub.SITE / "one"
    (package / "__init__.py").write_text("A = 3\n")
    (package / "inner/deep.py").unlink()
    (package / "new").mkdir()
    (package / "new/new.py").write_text("N = 1\n")
    assert stamps(hub).keys() == {"one"}
    (package / "__init__.py").write_text(FILES["__init__.py"])
    (package / "inner/deep.py").write_text(FILES["inner/deep.py"])
    (package / "new/new.py").unlink()
    assert stamps(hub).keys() == {"one"}, "a folder more can be imported"
    (package / "new").rmdir()
    assert stamps(hub) == {}
    after = {path: path.read_bytes() for path in hub.rglob("*") if path.is_file() and path.name != hub_look.SEEN}
    assert after == before


def value_of(hub: Path, words: str) -> str:
    """What a process prints that imports from the package `one`; the last line of its error where it fails."""
    program = f"import sys; sys.path.insert(0, {str(hub / 'one' / install_hub.SITE)!r}); import one; {words}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return (done.stdout or done.stderr).splitlines()[-1]


def test_a_changed_source_is_what_runs(hub: Path) -> None:
    source = hub / "one" / install_hub.SITE / "one/__init__.py"
    assert value_of(hub, "print(one.A)") == "1"
    source.write_text("A = 5\n")
    hub_look.look_and_stamp(hub)
    assert value_of(hub, "print(one.A)") == "5"
    source.write_text("A = \n")
    hub_look.look_and_stamp(hub)
    assert value_of(hub, "print(one.A)") == "SyntaxError: invalid syntax"


def test_byte_code_that_others_leave_is_no_change(hub: Path) -> None:
    """pytest writes its own beside a plugin's; a Python of another version too."""
    cache = hub / "one" / install_hub.SITE / "one/__pycache__"
    for name in [f"__init__.{hub_look.TAG}-pytest-9.0.2.pyc", "__init__.cpython-399.pyc"]:
        (cache / name).write_bytes(b"code")
    (cache / f"__init__.{hub_look.TAG}.pyc").unlink()
    assert stamps(hub) == {}
    assert [path.name for path in cache.iterdir()] == [f"__init__.{hub_look.TAG}.pyc"]


def test_wheels_are_looked_at_too(hub: Path) -> None:
    (hub / "wheels/one.whl").write_bytes(b"PK2")
    assert stamps(hub).keys() == {"."}
    (hub / "wheels/one.whl").write_bytes(b"PK")
    assert stamps(hub) == {}


def test_without_a_memory_of_the_last_look_everything_is_read(hub: Path) -> None:
    (hub / hub_look.SEEN).unlink()
    assert stamps(hub) == {}
    (hub / hub_look.SEEN).unlink()
    (hub / "other" / install_hub.SITE / "other/data.txt").write_text("else\n")
    assert stamps(hub).keys() == {"other"}


def test_a_package_that_is_gone_with_its_build_file_is_bazels_to_say(hub: Path) -> None:
    shutil.rmtree(hub / "other")
    assert stamps(hub) == {}


def test_it_says_which_package_and_when_it_is_as_before(hub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = hub / "other" / install_hub.SITE / "other/data.txt"
    path.write_text("else\n")
    stamps(hub)
    assert capfd.readouterr().err == "bazelw: @hub//other was changed by hand\n"
    path.write_text(FILES["data.txt"])
    stamps(hub)
    stamps(hub)
    assert capfd.readouterr().err == "bazelw: @hub//other is as installed again\n"


def test_a_find_that_is_not_gnus_is_named(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "find").write_text("#!/bin/sh\necho 'unrecognized: -printf' >&2; exit 1\n")
    (tmp_path / "find").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(SystemExit, match=r"it has to be GNU's \(Debian: findutils\). unrecognized: -printf"):
        hub_look.look_and_stamp(hub)
