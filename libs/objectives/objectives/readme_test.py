"""The README's example runs, and so do those of the doors in the modules' docstrings."""

import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from objectives import GRPO, advantages, losses
from objectives.advantages import ESTIMATORS
from objectives.losses import POLICY_LOSSES
from objectives.registry import Registry


def test_example() -> None:
    text = (Path(__file__).parents[1] / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    names: dict[str, Any] = {}
    exec(compile(code, "README.md", "exec"), names)
    assert float(names["metrics"]["ratio"][1]) == 4


@pytest.mark.parametrize(("module", "registry"), [(advantages, ESTIMATORS), (losses, POLICY_LOSSES)])
def test_the_docstring_registers_what_it_shows(module: ModuleType, registry: Registry[Any]) -> None:
    before = dict(registry)
    text = module.__doc__
    assert text is not None
    lines = text[text.index("    @register") :].split("\n\n")[0]
    exec(compile(textwrap.dedent(lines), module.__name__, "exec"), {"torch": torch, **vars(module)})
    (name,) = set(registry) - set(before)
    if registry is POLICY_LOSSES:
        assert GRPO(policy_loss=name).zero_gradient_rows  # type: ignore[truthy-function]
    else:
        assert ESTIMATORS[name].min_group_size == 2
    registry._entries.clear()
    registry._entries.update(before)
