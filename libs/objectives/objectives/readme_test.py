"""The README's example runs, and so do those of the doors in the modules' docstrings."""

import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from objectives import advantages, losses, policy_loss
from objectives.advantages import ESTIMATORS
from objectives.losses import POLICY_LOSSES
from objectives.registry import Registry


def test_example() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert float(names["metrics"]["ratio"][1]) == 4


def test_the_docstring_registers_what_it_shows() -> None:
    before = dict(ESTIMATORS)
    exec(_block(advantages, "    @register"), {"torch": torch, **vars(advantages)})
    (name,) = set(ESTIMATORS) - set(before)
    assert ESTIMATORS[name].min_group_size == 2
    ESTIMATORS._entries.clear()
    ESTIMATORS._entries.update(before)


@pytest.mark.parametrize(("module", "registry"), [(advantages, ESTIMATORS), (policy_loss, POLICY_LOSSES)])
def test_what_the_docstring_shows_is_taken_from_a_file(
    module: ModuleType, registry: Registry[Any], tmp_path: Path
) -> None:
    code = _block(module, "    def ")
    (tmp_path / "mine.py").write_text(f"from {module.__name__} import *\nfrom {losses.__name__} import *\n{code}")
    name = code.split("(")[0].removeprefix("def ")
    assert registry.named(f"{tmp_path}/mine.py:{name}")


def _block(module: ModuleType, start: str) -> str:
    assert module.__doc__ is not None
    return textwrap.dedent(module.__doc__[module.__doc__.index(start) :].split("\n\n")[0])
