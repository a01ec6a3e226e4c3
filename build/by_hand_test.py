"""Property tests run by hand have no time limits either, whatever library they are of."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).absolute().parent.parent / "conftest.py"
SLOW = """import time

from hypothesis import given, settings, strategies as st

SEEN = []


@settings(max_examples=2)
@given(st.integers())
def test_slow_once(number):
    if not SEEN:  # as on a machine that was busy for a moment: by default an error of timing that cannot be repeated
        SEEN.append(number)
        time.sleep(0.3)


@settings(max_examples=12)
@given(st.integers().map(lambda number: time.sleep(0.12)))
def test_slow_examples(nothing):
    pass
"""


@pytest.mark.parametrize(("with_conftest", "failed"), [(True, 0), (False, 2)])
def test_a_busy_machine_fails_no_property(tmp_path, with_conftest, failed):
    if with_conftest:
        shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (tmp_path / "slow_test.py").write_text(SLOW)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "slow_test.py"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("CI", None)  # hypothesis has a profile for it
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert f"{failed} failed" in done.stdout if failed else "2 passed" in done.stdout, done.stdout
