"""The committed table of capabilities is the printed one, and each Yes is a test that Bazel runs."""

import ast
import re
from pathlib import Path

from rollout.capability_table import answers, main
from seqpack.capability import tests_named as named_tests

LIBRARY = Path(__file__).parents[1]


def test_the_committed_table_is_what_the_command_prints(capsys):
    assert main() == 0
    printed = capsys.readouterr().out
    assert printed == (LIBRARY / "CAPABILITIES.md").read_text(), "python -m rollout capabilities > CAPABILITIES.md"
    assert printed.count("\n| ") > len(answers()["native"])


def test_each_yes_names_a_test_target_that_is_run():
    build = (LIBRARY / "BUILD.bazel").read_text()
    targets = dict(re.findall(r'module_test\(\n    name = "(.*?)",\n(.*?)\n\)\n', build, re.DOTALL))
    for file, function in named_tests(answers()):
        target = targets[file.removesuffix(".py")]
        assert '"manual"' not in target, file
        tree = ast.parse((LIBRARY / "rollout" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, function)
