"""Lay the apps out in their wheel, under a name that collides with nobody's: hatchling calls this.

`apps` is a name that others use. So `apps/tessera_apps` becomes the package `tessera_apps`, all other folders become
`tessera_apps.apps`, and the dotted names in the files follow.
"""

import ast
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE = "tessera_apps"
FOLDERS = ("common", "grpo", "quickstart", "sft", PACKAGE)
LEFT_OUT = {"__pycache__", "benchmarks", "testing", "tests"}
SUFFIXES = {".jinja", ".py", ".typed"}
DOTTED = re.compile(rf"(?<![\w./-])apps(?=\.(?:{'|'.join(FOLDERS)})\b)")
IMPORTED = re.compile(r"^from apps import ", re.M)


class AppsHook(BuildHookInterface):  # type: ignore[misc]
    """The hook that hatchling finds in this file."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the files as the wheel has them, and tell hatchling their places."""
        assert version  # "standard" or "editable"
        if version == "editable":
            raise ValueError("the apps have another name in their wheel, so it can't be editable: leave -e out")
        self._written = tempfile.TemporaryDirectory()
        for place, text in laid_out(Path(self.root)).items():
            path = Path(self._written.name) / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            build_data["force_include"][str(path)] = place

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Delete what was written."""
        assert version, (build_data, artifact_path)
        self._written.cleanup()


def laid_out(root: Path) -> dict[str, str]:
    """Return the text of each file of the wheel by its path in it, from the apps' folder."""
    files = [root / "__init__.py", *sorted(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    return {
        placed(path.relative_to(root)): renamed(path.read_text(encoding="utf-8"), path)
        for path in files
        if path.suffix in SUFFIXES and path.is_file() and is_included(path.relative_to(root))
    }


def is_included(path: Path) -> bool:
    """Return whether the wheel has a file of the apps' folder: no test, and nothing that tests alone use."""
    return not path.name.endswith("_test.py") and not LEFT_OUT & set(path.parts)


def placed(path: Path) -> str:
    """Return the place of a file in the wheel: `grpo/main.py` -> `tessera_apps/apps/grpo/main.py`."""
    return path.as_posix() if path.parts[0] == PACKAGE else f"{PACKAGE}/apps/{path.as_posix()}"


def renamed(text: str, path: Path) -> str:
    """Return a file's text with the names that its imports have in the wheel.

    Raises:
        ValueError: the name of a module is left that the wheel does not have.
    """
    if path.suffix != ".py":
        return text
    text = IMPORTED.sub(f"from {PACKAGE}.apps import ", text)
    text = DOTTED.sub(f"{PACKAGE}.apps", text).replace(f"{PACKAGE}.apps.{PACKAGE}", PACKAGE)
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
        if left := [name for name in names if name == "apps" or re.match(r"apps\.\S*$", name)]:
            raise ValueError(f"{path} names {left[0]!r}: hatch_build.py has no place for it")
    return text
