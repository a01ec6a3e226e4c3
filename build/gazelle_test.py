"""The BUILD files that gazelle writes: a folder's targets declare what its files import, what is by hand stays."""

from pathlib import Path

import pytest
from gazelle import Tree, exports, imports_of, main

PEAK = """load("//build:defs.bzl", "library", "module", "module_test", "requirement")

library(
    name = "peak",
    deps = [":gone"],
)

module(
    name = "gone",
    deps = [":never"],
)

module_test(
    name = "rooms/slow_test",
    size = "large",
    data = ["README.md"],
    tags = ["slow"],
    deps = [
        ":gone",
        requirement("jinja2"),  # keep
        requirement(
            "wandb",
            hub = "pypi_extras",
        ),  # keep
        requirement("gone", hub = "pypi_extras"),
        "//libs/base:sums",  # keep
    ],
)

module(
    name = "rooms/spoken",
)

package_test(
    name = "rooms_test",
    shard_count = 2,
    exclude = ["gone_test.py"],
    deps = [
        requirement("numpy"),  # keep
    ],
)

# By hand.
filegroup(
    name = "hand",
    srcs = ["README.md"],
)

# Everybody.
package(default_visibility = ["//visibility:public"])
"""

FILES = {
    "build/locks/cpu.txt": "torch==2.0\njinja2==3.1\npytest==9.0\nnumpy==2.0\n",
    "build/locks/extras.txt": "openai==2.0\n",
    "libs/base/BUILD.bazel": 'load("//build:defs.bzl", "library", "module")\n\nlibrary(\n    name = "base",\n)\n',
    "libs/base/base/__init__.py": '_EXPORTS = {"add": "base.sums"}\n',
    "libs/base/base/sums.py": "import math\n\nimport torch\n",
    "libs/peak/BUILD.bazel": PEAK,
    "libs/peak/README.md": "```python\nimport numpy\n```\n",
    "libs/peak/peak/__init__.py": '_EXPORTS = {"climb": "peak.rooms.climb"}\n',
    "libs/peak/peak/top.py": "import peak.rooms.rope\n",
    "libs/peak/peak/top_test.py": "from peak.top import up\n",
    "libs/peak/peak/rooms/__init__.py": '"""Words."""\n',
    "libs/peak/peak/rooms/climb.py": "from base import add\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    import numpy\nfrom peak.rooms import rope\nfrom peak.rooms.deep import well\n",
    "libs/peak/peak/rooms/rope.py": "def f():\n    import torch\n    import not_locked\n",
    "libs/peak/peak/rooms/spoken.py": "import openai\nimport peak.rooms.rope\n",
    "libs/peak/peak/rooms/slow_test.py": "import pytest\nfrom peak import climb\nimport base\n",
    "libs/peak/peak/rooms/rope_test.py": "import peak.rooms.rope\n",
    "libs/peak/peak/rooms/deep/__init__.py": '"""Words."""\n',
    "libs/peak/peak/rooms/deep/well.py": "import base.sums\n",
}

EXPECTED = """LOADS

# Everybody.
package(default_visibility = ["//visibility:public"])

library(
    name = "peak",
    deps = [":rooms"],
)

python_package(
    name = "rooms",
    exclude = ["spoken.py"],
    deps = [":rooms/deep"],
)

python_package(
    name = "rooms/deep",
    deps = ["//libs/base:sums"],
)

module_test(
    name = "rooms/slow_test",
    size = "large",
    data = ["README.md"],
    tags = ["slow"],
    deps = [
        ":rooms",
        "//libs/base",
        "//libs/base:sums",  # keep
        requirement("jinja2"),  # keep
        requirement("numpy"),
        requirement("wandb", "pypi_extras"),  # keep
    ],
)

module(
    name = "rooms/spoken",
    deps = [
        ":rooms",
        requirement("openai", "pypi_extras"),
    ],
)

package_test(
    name = "rooms_test",
    shard_count = 2,
    deps = [
        requirement("numpy"),  # keep
    ],
)

module(
    name = "top",
    deps = [":rooms"],
)

package_test(
    name = "peak_test",
    deps = [":top"],
)

# By hand.
filegroup(
    name = "hand",
    srcs = ["README.md"],
)
"""
MACROS = '"library", "module", "module_test", "package_test", "python_package", "requirement"'
EXPECTED = EXPECTED.replace("LOADS", f'load("//build:defs.bzl", {MACROS})')


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of two libraries, and the working directory in it."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["gazelle"])
    monkeypatch.delenv("BUILD_WORKSPACE_DIRECTORY", raising=False)
    return tmp_path


def forget() -> None:
    """Drop what was read of files of the same names."""
    exports.cache_clear()
    imports_of.cache_clear()


def tree() -> Tree:
    """The tree as it is now."""
    forget()
    return Tree()


def test_a_folder_declares_what_its_files_import(house: Path) -> None:
    """Through lazy facades to the file that is meant; imports for types and unlocked packages are no dependencies."""
    assert tree().text("libs/peak") == EXPECTED
    assert tree().complaints() == []


def test_written_files_stay_as_they_are(house: Path) -> None:
    """A second run changes nothing."""
    build = house / "libs/peak/BUILD.bazel"
    build.write_text(tree().text("libs/peak"))
    assert tree().text("libs/peak") == build.read_text()


def test_a_new_file_changes_no_build_file(house: Path) -> None:
    """Neither a module nor a test, as long as they import nothing new."""
    (house / "libs/peak/peak/rooms/axe.py").write_text("import peak.rooms.rope\n")
    (house / "libs/peak/peak/rooms/axe_test.py").write_text("import peak.rooms.axe\n")
    assert tree().text("libs/peak") == EXPECTED
    (house / "libs/peak/peak/top_two_test.py").write_text("import peak.top\n")
    assert tree().text("libs/peak") == EXPECTED


def test_a_registry_is_all_of_its_folder(house: Path) -> None:
    """A package that reads its `__path__` has every module there is; whoever imports it needs the folder."""
    (house / "libs/peak/peak/rooms/deep/__init__.py").write_text("LIST = pkgutil.iter_modules(__path__)\n")
    (house / "libs/peak/peak/top.py").write_text("import peak.rooms.deep\n")
    assert 'module(\n    name = "top",\n    deps = [":rooms/deep"],\n)' in tree().text("libs/peak")


def test_an_app_is_imported_from_the_top_of_the_tree(house: Path) -> None:
    """A program needs the target of its file."""
    for name, text in {
        "BUILD.bazel": 'load("//build:defs.bzl", "app")\n\napp(\n    name = "run",\n    main = "main.py",\n)\n',
        "__init__.py": "",
        "main.py": "from apps.one.tasks.sums import count\n",
        "tasks/__init__.py": "",
        "tasks/sums.py": "from base import add\n",
        "tests/__init__.py": "",
        "tests/all_test.py": "import apps.one.main\n",
    }.items():
        (house / "apps/one" / name).parent.mkdir(parents=True, exist_ok=True)
        (house / "apps/one" / name).write_text(text)
    assert tree().text("apps/one") == (
        'load("//build:defs.bzl", "app", "module", "package_test", "python_package")\n\n'
        'module(\n    name = "main",\n    deps = [":tasks"],\n)\n\n'
        'python_package(\n    name = "tasks",\n    deps = ["//libs/base:sums"],\n)\n\n'
        'package_test(\n    name = "tests_test",\n    deps = [":main"],\n)\n\n'
        'app(\n    name = "run",\n    main = "main.py",\n    deps = [":main"],\n)\n'
    )


def test_folders_that_need_each_other_are_named(house: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With an import of each direction, once; and nothing is written."""
    (house / "libs/peak/peak/rooms/deep/well.py").write_text("from peak.rooms import rope\n")
    forget()
    assert main() == 1
    assert capsys.readouterr().out == (
        "//libs/peak:rooms/deep and //libs/peak:rooms need each other: "
        "libs/peak/peak/rooms/deep/well.py imports peak.rooms.rope; "
        "libs/peak/peak/rooms/climb.py imports peak.rooms.deep.well\n"
    )
    assert (house / "libs/peak/BUILD.bazel").read_text() == PEAK


def test_a_longer_circle_is_named_from_arrow_to_arrow(house: Path) -> None:
    (house / "libs/peak/peak/rooms/deep/well.py").write_text("import peak.top\n")
    (complaint,) = tree().complaints()
    assert complaint == (
        "//libs/peak:rooms/deep and //libs/peak:top and //libs/peak:rooms need each other: "
        "libs/peak/peak/rooms/deep/well.py imports peak.top; libs/peak/peak/top.py imports peak.rooms.rope; "
        "libs/peak/peak/rooms/climb.py imports peak.rooms.deep.well"
    )


def test_what_another_target_brings_is_not_declared_again(house: Path) -> None:
    (house / "libs/peak/peak/top.py").write_text("import torch\nimport base.sums\nimport peak.rooms.deep.well\n")
    assert 'name = "top",\n    deps = [":rooms/deep"],\n)' in tree().text("libs/peak")


def test_what_few_need_is_no_burden_for_all(house: Path) -> None:
    """A package of @pypi_extras asks for a target of its own."""
    (house / "libs/peak/peak/rooms/rope.py").write_text("import openai\n")
    (complaint,) = tree().complaints()
    assert complaint.startswith("libs/peak/peak/rooms/rope.py imports openai, of @pypi_extras")
    assert 'module(name = "rooms/rope")' in complaint


def test_files_that_need_the_same_are_one_rule_with_a_target_each(house: Path) -> None:
    """It drops a file that is gone, and its deps are what any of the others imports."""
    build = house / "libs/peak/BUILD.bazel"
    rule = 'module_tests(\n    name = "gpu_tests",\n    srcs = [{}],\n    tags = ["gpu"],\n)\n'
    build.write_text(PEAK + rule.format('"peak/top_test.py", "peak/rooms/rope_test.py", "peak/gone_test.py"'))
    assert rule.format('\n        "peak/rooms/rope_test.py",\n        "peak/top_test.py",\n    ').replace(
        "\n)", '\n    deps = [":top"],\n)'
    ) in tree().text("libs/peak")
    assert not {"peak_test", "rooms_test"} & {rule.name for rule in tree().rules["libs/peak"]}, "none is left for these"


def test_files_together_are_one_target(house: Path) -> None:
    """Who imports one of them needs that target."""
    build = house / "libs/peak/BUILD.bazel"
    (house / "libs/peak/peak/rooms/deep/well_test.py").write_text("import peak.top_test\n")
    srcs = '        "peak/rooms/rope_test.py",\n        "peak/top_test.py",\n'
    rule = 'module_tests(\n    name = "own_tests",\n    srcs = [\n{}    ],\n    together = True,\n)\n'
    build.write_text(f"{PEAK}\n{rule.format(srcs)}")
    assert 'name = "rooms/deep_test",\n    deps = [":own_tests"],\n' in tree().text("libs/peak")
    assert tree().complaints() == []


def test_a_test_target_has_further_folders(house: Path) -> None:
    """It needs what their tests import, and they have no target of tests of their own."""
    build = house / "libs/peak/BUILD.bazel"
    build.write_text(PEAK + '\npackage_test(\n    name = "peak_test",\n    folders = ["rooms"],\n)\n')
    (house / "libs/peak/peak/rooms/rope_test.py").write_text("import numpy\n")
    text = tree().text("libs/peak")
    assert 'name = "rooms_test"' not in text
    (rule,) = [rule for rule in tree().rules["libs/peak"] if rule.name == "peak_test"]
    assert [path.name for path in rule.files] == ["top_test.py", "rope_test.py"]
    assert rule.deps == ['":top"', 'requirement("numpy")']
    build.write_text(build.read_text().replace('["rooms"]', '["rooms", "rooms"]'))
    assert tree().complaints() == ["//libs/peak has two targets named rooms_test: rename a file or a folder"]


def test_two_targets_of_one_name_are_refused(house: Path) -> None:
    """A file's own target may have the name of another folder's tests."""
    (house / "libs/peak/peak/rooms_test.py").write_text("import peak.top\n")
    build = house / "libs/peak/BUILD.bazel"
    build.write_text(PEAK + '\nmodule_test(\n    name = "rooms_test",\n    tags = ["gpu"],\n)\n')
    assert tree().complaints() == ["//libs/peak has two targets named rooms_test: rename a file or a folder"]
