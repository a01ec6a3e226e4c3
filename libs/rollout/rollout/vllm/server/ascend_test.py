"""vllm-ascend: refused outside the versions it was read in; what we use of it is in its source distribution."""

import ast
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from rollout.testing import read_vllm_ascend
from rollout.vllm.server.ascend import LAYOUT, LAYOUT_VARIABLE, VERSIONS, ascend_arguments, refuse_other_versions

READ = json.loads(Path(read_vllm_ascend.__file__).with_name("vllm_ascend.json").read_text())
SERVER = Path(__file__).parent


@pytest.mark.parametrize("found", ["0.22.1", "0.24.0", "0.18.0rc1", "1.0.0"])
def test_another_version_is_refused(found: str) -> None:
    with pytest.raises(ValueError, match=f"written for vllm-ascend >=.*, and {found} is installed"):
        ascend_arguments({}, {}, found)


def test_refused_where_there_is_none() -> None:
    with pytest.raises(ValueError, match=r"vLLM on NPUs needs vllm-ascend >=.*, which is not installed"):
        refuse_other_versions(None)


def test_matrices_are_plain() -> None:
    arguments, variables = ascend_arguments({"model": "m", "additional_config": {"x": 1}}, {}, READ["version"])
    assert arguments == {"model": "m", "additional_config": {"x": 1, LAYOUT: 0}}
    assert variables == {LAYOUT_VARIABLE: "0"}


@pytest.mark.parametrize(
    ("arguments", "environ"), [({"additional_config": {LAYOUT: 1}}, {}), ({}, {LAYOUT_VARIABLE: "2"})]
)
def test_its_own_layout_is_refused(arguments: dict[str, Any], environ: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="set it to 0"):
        ascend_arguments(arguments, environ, READ["version"])


def test_what_is_used_is_there() -> None:
    """Of the version that was read: the settings, and of a worker what vLLM's engine and our part of it call."""
    assert SpecifierSet(VERSIONS).contains(READ["version"])
    assert LAYOUT in READ["settings"]
    assert LAYOUT_VARIABLE in READ["variables"]
    worker, runner = READ["classes"]["NPUWorker"], READ["classes"]["NPUModelRunner"]
    assert worker["methods"]["sleep"] == "self, level: int=1"
    assert worker["methods"]["wake_up"] == "self, tags: list[str] | None=None"
    assert (worker["bases"], runner["bases"]) == (["WorkerBase"], ["GPUModelRunner"])
    assert "reload_weights" not in runner["methods"], "vLLM's own reads weights"
    assert READ["pins"] == {"torch": "2.10.0", "torch-npu": "2.10.0.post4"}


def test_our_part_of_a_worker_replaces_nothing() -> None:
    """vLLM refuses a worker extension that has a name of the worker's."""
    ours: set[str] = set()
    for file in ("worker.py", "routes.py", "vision_probe.py"):
        for node in ast.walk(ast.parse((SERVER / file).read_text())):
            if isinstance(node, ast.ClassDef):
                ours |= {member.name for member in node.body if isinstance(member, ast.FunctionDef)}
    ours = {name for name in ours if not name.startswith("_")}
    assert {"load_file", "settle_in"} <= ours
    assert ours & READ["classes"]["NPUWorker"]["methods"].keys() == set()


def archive(folder: Path, **changes: str | None) -> Path:
    """A source distribution of one line a file."""
    files: dict[str, str | None] = {
        "PKG-INFO": "Version: 0.23.0\nRequires-Dist: torch==2.10.0\nRequires-Dist: torch-npu==2.10.0.post4\n",
        "vllm_ascend/envs.py": "variables = {'VLLM_ASCEND_X': lambda: 1}",
        "vllm_ascend/ascend_config.py": "class AscendConfig:\n    def __init__(self):\n        self.x = 1",
    }
    for path, name in read_vllm_ascend.CLASSES.items():
        files[f"vllm_ascend/{path}"] = f"class {name}(Base):\n    def f(self, x: int=1): ...\n    def _g(self): ..."
    made = folder / "vllm_ascend-0.23.0.tar.gz"
    with tarfile.open(made, "w:gz") as opened:
        for name, text in {**files, **changes}.items():
            if text is not None:
                member = tarfile.TarInfo(f"vllm_ascend-0.23.0/{name}")
                member.size = len(text)
                opened.addfile(member, io.BytesIO(text.encode()))
    return made


def test_names_are_read_without_importing(tmp_path: Path) -> None:
    found = read_vllm_ascend.read_names(archive(tmp_path))
    one = {"bases": ["Base"], "methods": {"f": "self, x: int=1"}}
    assert found == {
        "version": "0.23.0",
        "pins": READ["pins"],
        "classes": dict.fromkeys(read_vllm_ascend.CLASSES.values(), one),
        "variables": ["VLLM_ASCEND_X"],
        "settings": ["x"],
    }
    with pytest.raises(ValueError, match=r"has no vllm_ascend/envs\.py"):
        read_vllm_ascend.read_names(archive(tmp_path, **{"vllm_ascend/envs.py": None}))
