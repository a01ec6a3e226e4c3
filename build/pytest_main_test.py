"""The test wrapper: whose kernels a test sees, and the processes that it starts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from build import pytest_main

SEES = """
import multiprocessing, subprocess, sys

LOOK = "__import__('importlib.util').util.find_spec('kernels_of_a_device') is not None"


def test_what_is_seen():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        spawned = pool.apply_async(eval, (LOOK,)).get(50)
    called = subprocess.run([sys.executable, "-c", f"print({LOOK})"], check=True, capture_output=True, text=True).stdout
    print("seen:", eval(LOOK), spawned, called.strip())
"""
CASES = [((), False), (("slow",), False), (("gpu",), True), (("slow", "gpu4"), True)]


@pytest.mark.parametrize(("tags", "seen"), CASES)
def test_the_kernels_hub_is_for_tests_of_devices_alone(tmp_path: Path, tags: tuple[str, ...], seen: bool) -> None:
    """They may import a package of it, and so may what they spawn or call; no other test, nor its processes."""
    package = tmp_path / "_main~hubs~pypi_kernels" / "one" / "site-packages" / "kernels_of_a_device"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    file = tmp_path / "sees_test.py"
    file.write_text(SEES)
    left_out = ("TEST", "XML", "CI")
    known = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    known["PYTHONPATH"] = os.pathsep.join([str(package.parent), *sys.path])
    command = [sys.executable, pytest_main.__file__, str(file), "-s", *(f"--tessera-tag={tag}" for tag in tags)]
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=100)
    assert f"seen: {seen} {seen} {seen}" in done.stdout, done.stdout + done.stderr


STARTS = """
import logging, multiprocessing, os, sys, warnings
import pytest
import shelve

shelve.made = "by the test's file"


def look(pipe):
    warnings.warn("warned of")
    logging.getLogger("any").warning("logged")
    print("printed")
    pipe.send((shelve.made, hasattr(shelve, "changed"), os.environ.get("NAME"), os.getcwd()))


def start(pipe):
    process = multiprocessing.get_context("spawn").Process(target=look, args=(pipe,))
    process.start()
    process.join()


@pytest.mark.parametrize("target", [look, start])
def test_what_a_process_has(target, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("NAME", "value")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shelve, "changed", True, raising=False)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=target, args=(there,))
    process.start()
    assert here.recv() == ("by the test's file", False, "value", str(tmp_path))
    process.join()
    said, warned = capfd.readouterr()
    assert (said, process.exitcode) == ("printed\\n", 0)
    assert "warned of" in warned and "logged" in warned
"""


def test_a_process_is_forked_from_before_the_tests_with_what_its_starter_has(tmp_path: Path) -> None:
    """Modules as the files have left them, not as a test has; environment, folder and output of who starts it."""
    (tmp_path / "starts_test.py").write_text(STARTS)
    done = run(tmp_path, "starts_test.py")
    assert "2 passed" in done.stdout, done.stdout + done.stderr


DRAWS = """
import multiprocessing

import pytest
import torch


@pytest.fixture(scope="module")
def before():
    return torch.rand(1).item()


def draw(pipe):
    pipe.send(torch.rand(1).item())


def drawn(number):
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=draw, args=(there,))
    process.start()
    value = here.recv()
    process.join()
    return value


@pytest.mark.parametrize("case", range(2))
def test_draws(before, case):
    values = [before, torch.rand(1).item(), drawn(0), drawn(1)]
    assert len(set(values)) == 4
    print("DREW", case, *values)
"""


def test_what_is_drawn_without_a_seed_is_the_same_in_each_run_and_in_no_two_tests_or_processes(tmp_path: Path) -> None:
    (tmp_path / "draws_test.py").write_text(DRAWS)
    runs = [run(tmp_path, "-s", "draws_test.py").stdout for _ in range(2)]
    drew = [[line for line in out.splitlines() if "DREW" in line] for out in runs]
    assert len(drew[0]) == 2, runs[0]
    assert drew[0] == drew[1]
    values = [line.split("DREW")[1].split()[2:] for line in drew[0]]
    assert len({*values[0], *values[1]}) == 6


def run(tmp_path: Path, *files: str, only: str = "") -> "subprocess.CompletedProcess[str]":
    """The wrapper over files of the folder, with --test_filter or without."""
    known = {key: value for key, value in os.environ.items() if not key.startswith(("TEST", "XML", "CI"))}
    known |= {"PYTHONPATH": os.pathsep.join(sys.path), "TESTBRIDGE_TEST_ONLY": only}
    command = [sys.executable, pytest_main.__file__, *(f if f[0] == "-" else str(tmp_path / f) for f in files)]
    return subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=100)


FILES = {
    "pack_test.py": "def test_bounds(): pass\ndef test_other(): pass\n",
    "bounds_test.py": "def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n",
    "unpack_test.py": "def test_four(): pass\n",
}


@pytest.mark.parametrize(
    ("only", "passed"),
    [
        ("", 6),
        ("pack_test", 2),  # the file of this name alone
        ("unpack_test.py", 1),
        ("bounds", 4),  # a file and a case
        ("bounds and not one", 3),
        ("test_four", 1),
        ("nothing", 0),
    ],
)
def test_a_filter_takes_one_file_or_some_cases(
    tmp_path_factory: pytest.TempPathFactory, only: str, passed: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("f")  # the names of folders count too
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = run(tmp_path, *FILES, only=only)
    assert (f"{passed} passed" in done.stdout) == (passed > 0), done.stdout + done.stderr
    assert done.returncode == (0 if passed else 5)


def test_a_file_without_a_test_is_a_failure(tmp_path: Path) -> None:
    """Beside others, and whatever the filter; an error in another file is told alone."""
    (tmp_path / "pack_test.py").write_text(FILES["pack_test.py"])
    (tmp_path / "empty_test.py").write_text("def tset_typo(): pass\n")
    for only in ("", "bounds"):
        done = run(tmp_path, "pack_test.py", "empty_test.py", only=only)
        assert done.returncode == 1
        assert f"no test was found in {tmp_path / 'empty_test.py'}" in done.stdout
    assert run(tmp_path, "pack_test.py", "empty_test.py", only="pack_test").returncode == 0
    (tmp_path / "pack_test.py").write_text("import not_there\n")
    done = run(tmp_path, "pack_test.py", "empty_test.py")
    assert done.returncode == 2
    assert "no test was found" not in done.stdout


def test_a_file_finds_no_process_group_of_another(tmp_path: Path) -> None:
    """What the tests of one file leave is gone before those of the next."""
    leaves = "def test_it():\n    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    for name, text in {"a": leaves, "b": "def test_it():\n    assert not dist.is_initialized()\n"}.items():
        (tmp_path / f"{name}_test.py").write_text(f"import torch.distributed as dist\n\n\n{text}")
    files = [str(tmp_path / f"{name}_test.py") for name in ("a", "b")]
    known = {key: value for key, value in os.environ.items() if not key.startswith(("TEST", "XML", "CI"))}
    known |= {"PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, pytest_main.__file__, *files]
    done = subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=100)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
