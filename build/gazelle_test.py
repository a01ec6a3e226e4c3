"""The BUILD files that gazelle writes: each target declares what its file imports, and what was said by hand stays."""

from pathlib import Path

import pytest
from gazelle import Tree, exports, generate, imports_of

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
    "libs/peak/peak/rooms/__init__.py": '"""Words."""\n',
    "libs/peak/peak/rooms/climb.py": "from base import add\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    import numpy\nfrom peak.rooms import rope\n",
    "libs/peak/peak/rooms/rope.py": "def f():\n    import torch\n    import openai\n    import not_locked\n",
    "libs/peak/peak/rooms/slow_test.py": "import pytest\nfrom peak import climb\nimport base\n",
}

EXPECTED = """load("//build:defs.bzl", "library", "module", "module_test", "requirement")

# Everybody.
package(default_visibility = ["//visibility:public"])

library(
    name = "peak",
    deps = [":rooms/climb"],
)

module(
    name = "rooms/climb",
    deps = [
        ":rooms/rope",
        "//libs/base:sums",
    ],
)

module(
    name = "rooms/rope",
    deps = [
        requirement(
            "openai",
            hub = "pypi_extras",
        ),
        requirement("torch"),
    ],
)

module_test(
    name = "rooms/slow_test",
    size = "large",
    data = ["README.md"],
    tags = ["slow"],
    deps = [
        ":rooms/climb",
        "//libs/base",
        "//libs/base:sums",  # keep
        requirement("jinja2"),  # keep
        requirement("numpy"),
        requirement(
            "wandb",
            hub = "pypi_extras",
        ),  # keep
    ],
)

# By hand.
filegroup(
    name = "hand",
    srcs = ["README.md"],
)
"""


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of two libraries, and the working directory in it."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    exports.cache_clear()
    imports_of.cache_clear()
    return tmp_path


def test_a_file_declares_what_it_imports(house: Path) -> None:
    """Through lazy facades to the file that is meant; imports for types and unlocked packages are no dependencies."""
    assert generate(Tree(), "libs/peak") == EXPECTED


def test_written_files_stay_as_they_are(house: Path) -> None:
    """A second run changes nothing."""
    build = house / "libs/peak/BUILD.bazel"
    build.write_text(generate(Tree(), "libs/peak"))
    assert generate(Tree(), "libs/peak") == build.read_text()


def test_a_new_file_is_a_new_target(house: Path) -> None:
    """One edit adds a module."""
    (house / "libs/peak/peak/rooms/axe.py").write_text("import peak.rooms.rope\n")
    assert 'module(\n    name = "rooms/axe",\n    deps = [":rooms/rope"],\n)' in generate(Tree(), "libs/peak")


def test_a_registry_needs_every_file_of_its_folder(house: Path) -> None:
    """A package that reads its `__path__` imports by name what a new file adds; its tests are not part of it."""
    (house / "libs/peak/peak/rooms/__init__.py").write_text("import pkgutil\nLIST = pkgutil.iter_modules(__path__)\n")
    exports.cache_clear()
    imports_of.cache_clear()
    text = generate(Tree(), "libs/peak")
    assert (
        'module(\n    name = "rooms",\n    srcs = ["peak/rooms/__init__.py"],\n    deps = [\n'
        '        ":rooms/climb",\n        ":rooms/rope",\n    ],\n)' in text
    )
