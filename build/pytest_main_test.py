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
