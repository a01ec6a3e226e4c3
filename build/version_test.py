"""One version for all libraries, and the command that changes it."""

from pathlib import Path

import pytest
import version

ROOT = Path(__file__).absolute().parents[1]


def tree(root: Path) -> None:
    """Write a small tree that agrees with itself."""
    texts = {
        "build/version.bzl": '"""Words."""\n\nVERSION = "1.2.3"\n',
        "CHANGELOG.md": "# Changes\n\n## 1.2.3\n\nNew.\n\n## 1.2.2\n",
        "libs/base/base/__init__.py": '__version__ = "1.2.3"\n',
        "libs/base/base/room/__init__.py": "",
        "libs/base/pyproject.toml": 'dependencies = ["torch>=1.2.3"]\n',
        "apps/__init__.py": '__version__ = "1.2.3"\n',
        "apps/one/__init__.py": "",
        "apps/pyproject.toml": 'dependencies = ["tessera-peak[fast,x]==1.2.3"]\n',
        "libs/peak/peak/__init__.py": '__version__ = "1.2.3"\n',
        "libs/peak/pyproject.toml": 'dependencies = ["tessera-base==1.2.3", "numpy==1.2.3"]\n',
    }
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_every_place_of_the_tree_agrees() -> None:
    assert version.complaints(ROOT) == []
    assert len(version.facades(ROOT)) == 10
    pins = version.found(ROOT)
    assert sum(len(named) for name, named in pins.items() if name.endswith("pyproject.toml")) == 24


def test_it_is_written_everywhere_but_in_the_change_log(tmp_path: Path) -> None:
    tree(tmp_path)
    assert version.complaints(tmp_path) == []
    version.write(tmp_path, "2.0.0rc1")
    assert version.complaints(tmp_path) == ["CHANGELOG.md: 1.2.3, not 2.0.0rc1"]
    text = (tmp_path / "libs/peak/pyproject.toml").read_text()
    assert text == 'dependencies = ["tessera-base==2.0.0rc1", "numpy==1.2.3"]\n'
    assert (tmp_path / "apps/pyproject.toml").read_text() == 'dependencies = ["tessera-peak[fast,x]==2.0.0rc1"]\n'


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("libs/base/base/__init__.py", '__version__ = "1.2.4"\n'),
        ("libs/base/base/__init__.py", ""),
        ("libs/peak/pyproject.toml", 'dependencies = ["tessera-base==1.2.2"]\n'),
        ("apps/pyproject.toml", 'dependencies = ["tessera-peak[fast]==1.2.2"]\n'),
        ("apps/__init__.py", ""),
        ("CHANGELOG.md", "## 1.2.2\n"),
        ("CHANGELOG.md", ""),
    ],
)
def test_what_disagrees_is_named(tmp_path: Path, name: str, text: str) -> None:
    tree(tmp_path)
    (tmp_path / name).write_text(text)
    (complaint,) = version.complaints(tmp_path)
    assert complaint.startswith(name)


@pytest.mark.parametrize("word", ["1.2", "v1.2.3", "1.2.3.dev1", "next"])
def test_what_is_no_version_is_refused(tmp_path: Path, word: str) -> None:
    tree(tmp_path)
    with pytest.raises(ValueError, match=r"write X\.Y\.Z"):
        version.write(tmp_path, word)
    assert version.complaints(tmp_path) == []


def test_each_line_of_the_change_log_stands_under_its_kind() -> None:
    kind = ""
    for number, line in enumerate((ROOT / "CHANGELOG.md").read_text().splitlines(), 1):
        if line.startswith("#"):
            kind = line.removeprefix("### ") if line.startswith("### ") else ""
            assert not kind or kind in ("Added", "Changed", "Fixed", "Removed"), f"line {number}: {line}"
        assert kind or not line.startswith("- "), f"line {number} has no kind: {line}"
