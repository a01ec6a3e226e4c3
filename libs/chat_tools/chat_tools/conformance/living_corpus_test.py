"""What others have today, as files of the hub @pypi_corpus: chat templates, the names of parsers, parsers as judges."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chat_tools.conformance.check_templates import check_template
from chat_tools.conformance.corpus import fetched_templates

TEMPLATES = fetched_templates(None)


def test_all_templates_are_there() -> None:
    assert len(TEMPLATES) == 188


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_conforms(path: Path) -> None:
    assert check_template(str(path)).failures == []


@pytest.mark.parametrize("script", ["server_names.py", "judges/main.py"])
def test_no_name_is_unknown_and_no_difference_without_a_verdict(script: str) -> None:
    command = [sys.executable, str(Path(__file__).parents[2] / "benchmarks" / script)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout)  # the tables, for pytest -rP
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
