"""Which tests a changed file reruns, by the rules as Bazel prints them."""

import subprocess
from pathlib import Path

import pytest
from affected import Graph, changed, inside, label, rerun

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


PACKAGES = {"", "libs/a", "libs/b", "build", "build/locks"}


@pytest.mark.parametrize(
    "file",
    [
        "build/defs.bzl",
        "build/locks/cpu.txt",
        "build/locks/BUILD.bazel",  # of a package that no rule needs: repositories read it
        "build/install_hub.py",
        "third_party/rules_python/python/BUILD.bazel",
        "WORKSPACE",
        "MODULE.bazel",
        ".bazelrc",
        ".bazeliskrc",
        "build/bazel7.bazelrc",
        "bazelw",
    ],
)
def test_what_every_target_is_made_by_may_rerun_everything(file: str) -> None:
    graph = Graph(RULES)
    assert rerun(graph, file, PACKAGES) == (graph.tests, True)


def test_a_build_file_reruns_its_package_and_what_needs_it() -> None:
    graph = Graph(RULES)
    assert rerun(graph, "libs/a/BUILD.bazel", PACKAGES) == (graph.tests, False)
    assert rerun(graph, "libs/b/BUILD.bazel", PACKAGES) == ({"//libs/b:b_test"}, False)
    assert rerun(graph, "libs/b/BUILD.bazel", PACKAGES - {"libs/b"}) == ({"//libs/b:b_test"}, False), "it was deleted"
    assert rerun(graph, "libs/a/README.md", PACKAGES) == ({"//libs/a:aside_test"}, False)
    assert rerun(graph, "libs/a/unknown.py", PACKAGES) == (set(), False)


def test_a_deleted_file_counts_where_it_was() -> None:
    graph = Graph(RULES)
    core = rerun(graph, "libs/a/a/core.py", PACKAGES, deleted=True)
    assert core == ({"//libs/a:core_test", "//libs/b:b_test"}, False), "a rule names it still"
    assert rerun(graph, "libs/a/a/globbed.py", PACKAGES, deleted=True) == (graph.tests, False)
    assert rerun(graph, "notes.md", PACKAGES, deleted=True) == (set(), False), "in a package without a rule"


def test_deleted_and_renamed_files_are_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    for name in ("deleted.py", "renamed.py", "edited.py", "same.py"):
        (tmp_path / name).write_text(f"a = 1\nb = {name!r}\n")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    (tmp_path / "deleted.py").unlink()
    (tmp_path / "renamed.py").rename(tmp_path / "later.py")
    (tmp_path / "edited.py").write_text("")
    git("add", "later.py", "renamed.py")
    (tmp_path / "new.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert sorted(changed("HEAD")) == [
        ("deleted.py", True),
        ("edited.py", False),
        ("later.py", False),
        ("new.py", False),
        ("renamed.py", True),
    ]
    assert inside(tmp_path, tmp_path / "deleted.py", {"deleted.py"}) == "deleted.py"
