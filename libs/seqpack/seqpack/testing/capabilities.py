"""What holds a library's table of capabilities: the committed one is the printed one, each test in it is run."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from seqpack.capability import Supported, Unsupported, tests_named


def assert_committed(printed: str, library: Path) -> None:
    """Compare what `python -m LIBRARY capabilities` printed with the committed CAPABILITIES.md.

    Raises:
        AssertionError: they differ; it says the command.
    """
    committed = (library / "CAPABILITIES.md").read_text()
    assert printed == committed, f"python -m {library.name} capabilities > CAPABILITIES.md"


def assert_tests_are_run(answers: Mapping[str, Mapping[str, Supported | Unsupported]], library: Path) -> None:
    """Check the test of each supported feature: it is a function of its file, whose Bazel target is not manual.

    Raises:
        FileNotFoundError: there is no such file.
        AssertionError: it is no test file, its target is manual, or it lacks the function.
    """
    build = (library / "BUILD.bazel").read_text()
    rules = re.findall(r"^module_tests?\(\n(.*?)\n\)\n", build, re.DOTALL | re.MULTILINE)
    manual = "\n".join(rule for rule in rules if '"manual"' in rule)
    for file, function in tests_named(answers):
        assert file.endswith("_test.py"), file  # its folder's target runs it, where it has none of its own
        assert f'"{file.removesuffix(".py")}"' not in manual, file
        assert f'/{file}"' not in manual, file
        tree = ast.parse((library / library.name / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, function)
