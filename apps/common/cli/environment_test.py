import os
import subprocess
import sys
from pathlib import Path

import pytest

from apps.common.cli.environment import variables_to_set

PROGRAM = """
import os, sys
from apps.common.cli.environment import restart_with
before = os.environ.get("TESSERA_OWNED")
restart_with(["TESSERA_OWNED=1", "TESSERA_SET=2"])
print(before, os.environ["TESSERA_OWNED"], sys.argv[1:], flush=True)
"""


def test_only_what_is_not_set_is_set_and_another_value_is_refused() -> None:
    assert variables_to_set(["A=1", "B=2=3", "C="], {"A": "1"}) == {"B": "2=3", "C": ""}
    assert variables_to_set([], {}) == {}
    with pytest.raises(ValueError, match="A is '2' where the recipe wants '1': unset it"):
        variables_to_set(["A=1"], {"A": "2"})


def test_the_program_starts_again_once_with_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    environ = {**os.environ, "TESSERA_SET": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    environ.pop("TESSERA_OWNED", None)
    done = subprocess.run([sys.executable, path, "--x", "a b"], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "1 1 ['--x', 'a b']\n"
