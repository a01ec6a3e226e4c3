import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from apps.common.cli.recipes import load_recipes


@dataclass(frozen=True)
class Kind:
    config: SimpleNamespace


def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **files: str) -> str:
    """A package of recipes whose files have these contents."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for file, text in files.items():
        (folder / f"{file}.py").write_text(f"from types import SimpleNamespace\nfrom {__name__} import Kind\n{text}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    return name


def recipe(name: str) -> str:
    return f"RECIPE = Kind(SimpleNamespace(recipe={name!r}))"


def test_every_file_is_a_recipe_named_like_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_recipes(
        package(tmp_path, monkeypatch, "some", one=recipe("one"), two_words=recipe("two-words"), one_test="1/0"), Kind
    )
    assert sorted(loaded) == ["one", "two-words"]


def test_a_file_without_recipe_or_with_another_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"none\.one needs a constant RECIPE, a Kind"):
        load_recipes(package(tmp_path, monkeypatch, "none", one=""), Kind)
    with pytest.raises(ValueError, match=r"wrong\.one: RECIPE\.config\.recipe must be 'one'"):
        load_recipes(package(tmp_path, monkeypatch, "wrong", one=recipe("two")), Kind)
