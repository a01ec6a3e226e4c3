"""What holds a library's table of capabilities: the committed one is the printed one, each Yes a test that is run."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path

from seqpack.capability import No, Yes, tests_named


def assert_committed(printed: str, library: Path) -> None:
    """Compare what `python -m LIBRARY capabilities` printed with the committed CAPABILITIES.md.

    Raises:
        AssertionError: they differ; it says the command.
    """
    committed = (library / "CAPABILITIES.md").read_text()
    assert printed == committed, f"python -m {library.name} capabilities > CAPABILITIES.md"


def assert_tests_are_run(answers: Mapping[str, Mapping[str, Yes | No]], library: Path) -> None:
    """Look up the test of each Yes: a function of its file, whose Bazel target is not manual.

    Raises:
        KeyError: no target has that file.
        AssertionError: the target is manual, or the file lacks the function.
    """
    build = (library / "BUILD.bazel").read_text()
    targets = dict(re.findall(r'module_test\(\n    name = "(.*?)",\n(.*?)\n\)\n', build, re.DOTALL))
    for file, function in tests_named(answers):
        assert '"manual"' not in targets[file.removesuffix(".py")], file
        tree = ast.parse((library / library.name / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, function)
