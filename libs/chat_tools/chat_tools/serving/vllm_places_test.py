"""Where vLLM keeps its messages depends on its version: the plug-in finds them, or names the versions that it knows."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLUGIN = Path(__file__).with_name("vllm_plugin.py")
BASE = """
class ToolParser:
    def __init__(self, tokenizer, tools=None): pass

class ToolParserManager:
    @classmethod
    def register_module(cls, name, module): print(name)
"""


def run_beside(folder: Path, protocol: str) -> subprocess.CompletedProcess[str]:
    """Import the plug-in where vLLM is no more than the modules that it asks for."""
    for module, text in (("vllm.tool_parsers.abstract_tool_parser", BASE), (protocol, "")):
        *packages, name = module.split(".")
        place = folder
        for package in packages:
            place = place / package
            place.mkdir(exist_ok=True)
            (place / "__init__.py").touch()
        (place / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(folder), *sys.path])
    command = [sys.executable, str(PLUGIN)]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    "protocol", ["vllm.entrypoints.generate.base.protocol", "vllm.entrypoints.openai.engine.protocol"]
)
def test_both_places_are_known(tmp_path: Path, protocol: str) -> None:
    done = run_beside(tmp_path, protocol)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tessera_hermes" in done.stdout.split()


def test_another_place_is_an_error_that_names_versions(tmp_path: Path) -> None:
    done = run_beside(tmp_path, "vllm.elsewhere")
    assert "ImportError: this vLLM keeps its messages where neither 0.32 nor 0.26 does" in done.stderr
