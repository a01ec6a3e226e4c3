"""Read names and signatures out of vllm-ascend's source distribution, without importing it.

`python -m rollout.testing.read_vllm_ascend vllm_ascend-VERSION.tar.gz > vllm_ascend.json`. The archive is pip's:
`SOC_VERSION=ascend910b1 pip download --no-deps --no-binary :all: --no-build-isolation vllm-ascend==VERSION`, where
setuptools_scm is installed, as pip runs its setup.py.
"""

import ast
import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

CLASSES = {"worker/worker.py": "NPUWorker", "worker/model_runner_v1.py": "NPUModelRunner", "platform.py": "NPUPlatform"}
"""Those whose methods vLLM's engine and our part of a worker call, by file."""
PINNED = ("torch", "torch-npu")


def read_names(archive: Path) -> dict[str, Any]:
    """Return version, pins, variables, settings and classes. Raise ValueError where the archive lacks a file."""
    with tarfile.open(archive) as opened:
        files = {member.name.partition("/")[2]: member for member in opened.getmembers()}

        def text(path: str) -> str:
            reader = opened.extractfile(files[path]) if path in files else None
            if reader is None:
                raise ValueError(f"{archive.name} has no {path}")
            return reader.read().decode()

        described = text("PKG-INFO")
        classes = {name: _class(text(f"vllm_ascend/{path}"), name) for path, name in CLASSES.items()}
        variables, settings = _keys(text("vllm_ascend/envs.py")), _settings(text("vllm_ascend/ascend_config.py"))
    needs = dict(re.findall(r"^Requires-Dist: ([\w-]+)==(\S+)$", described, re.MULTILINE))
    return {
        "version": re.findall(r"^Version: (\S+)$", described, re.MULTILINE)[0],
        "pins": {name: needs[name] for name in PINNED},
        "classes": classes,
        "variables": variables,
        "settings": settings,
    }


def _class(source: str, name: str) -> dict[str, Any]:
    """Return bases, and public methods with their arguments as written."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef) and node.name == name]
    if len(classes) != 1:
        raise ValueError(f"there are {len(classes)} classes {name}")
    public = [node for node in classes[0].body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    methods = {node.name: ast.unparse(node.args) for node in public}
    return {"bases": [ast.unparse(base) for base in classes[0].bases], "methods": dict(sorted(methods.items()))}


def _keys(source: str) -> list[str]:
    """Return the names of the environment variables in its table."""
    tables = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict)]
    keys = [key.value for table in tables for key in table.keys if isinstance(key, ast.Constant)]
    return sorted({key for key in keys if isinstance(key, str)})


def _settings(source: str) -> list[str]:
    """Return the attributes of its configuration object."""
    config = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "AscendConfig")
    stored = (n for n in ast.walk(config) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return sorted({node.attr for node in stored if ast.unparse(node.value) == "self"})


if __name__ == "__main__":
    json.dump(read_names(Path(sys.argv[1])), sys.stdout, indent=1, sort_keys=True)
    sys.stdout.write("\n")
