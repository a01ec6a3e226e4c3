"""Which tests a changed file reruns, by the rules as Bazel prints them."""

from pathlib import Path

import pytest
from affected import Graph, inside, label

RULES = """<?xml version="1.1" encoding="UTF-8" standalone="no"?>
<query version="2">
  <rule class="py_library" name="//libs/a:core"><rule-input name="//libs/a:a/core.py"/></rule>
  <rule class="py_library" name="//libs/a:top"><rule-input name="//libs/a:core"/></rule>
  <rule class="py_library" name="//libs/a:aside"><rule-input name="//libs/a:a/aside.py"/></rule>
  <rule class="py_test" name="//libs/a:core_test"><rule-input name="//libs/a:core"/></rule>
  <rule class="py_test" name="//libs/b:b_test">
    <rule-input name="//libs/a:top"/><rule-input name="@pypi//torch:torch"/>
  </rule>
  <rule class="py_binary" name="//libs/a:program"><rule-input name="//libs/a:aside"/></rule>
  <rule class="py_test" name="//libs/a:aside_test">
    <rule-input name="//libs/a:program"/><rule-input name="//libs/a:README.md"/>
  </rule>
  <source-file name="//libs/a:a/core.py"/>
</query>
"""


def test_real_dependents_alone_are_affected() -> None:
    graph = Graph(RULES)
    assert graph.tests == {"//libs/a:core_test", "//libs/b:b_test", "//libs/a:aside_test"}
    assert graph.affected(["//libs/a:a/core.py"]) == {"//libs/a:core_test", "//libs/b:b_test"}
    assert graph.affected(["//libs/a:a/aside.py"]) == {"//libs/a:aside_test"}
    assert graph.affected(["//libs/a:README.md"]) == {"//libs/a:aside_test"}
    assert graph.affected(["//libs/a:a/gone.py"]) == set()
    assert graph.affected(["//libs/a:a/core.py", "//libs/a:README.md"]) == graph.tests


def test_a_file_belongs_to_the_nearest_package() -> None:
    packages = {"", "libs/a", "build", "build/proofs"}
    assert label("libs/a/a/rooms/x.py", packages) == "//libs/a:a/rooms/x.py"
    assert label("build/proofs/x.py", packages) == "//build/proofs:x.py"
    assert label("conftest.py", packages) == "//:conftest.py"
    assert label("libs/other/x.py", packages) == "//:libs/other/x.py"
    assert label("libs/other/x.py", packages - {""}) is None


def test_a_name_that_is_no_file_of_the_tree_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "there.py").touch()
    (tmp_path / "outside.py").touch()
    assert inside(tmp_path / "tree", tmp_path / "tree" / "there.py") == "there.py"
    for name in ("tree/gone.py", "outside.py", "tree"):
        with pytest.raises(SystemExit, match="no such file"):
            inside(tmp_path / "tree", tmp_path / name)
