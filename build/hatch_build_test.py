"""The apps' files have a place of their own in the wheel, and the names in them lead there."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parents[1]
SPEC = importlib.util.spec_from_file_location("hatch_build", ROOT / "apps/hatch_build.py")
hatch_build = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(hatch_build)


@pytest.mark.parametrize(
    ("text", "renamed"),
    [
        ("from apps.grpo.main import run\n", "from tessera_apps.apps.grpo.main import run\n"),
        (
            "import apps.sft.x\napps.sft.x.run\n",
            "import tessera_apps.apps.sft.x\ntessera_apps.apps.sft.x.run\n",
        ),
        ("from apps import __version__\n", "from tessera_apps.apps import __version__\n"),
        ("from apps.tessera_apps.words import x\n", "from tessera_apps.words import x\n"),
        ('NAME = "apps.grpo.recipes"\n', 'NAME = "tessera_apps.apps.grpo.recipes"\n'),
        ('A = "//apps/grpo, apps/grpo/x; the apps. grpo"\n', 'A = "//apps/grpo, apps/grpo/x; the apps. grpo"\n'),
    ],
)
def test_names_follow(text: str, renamed: str) -> None:
    assert hatch_build.renamed(text, Path("x.py")) == renamed


@pytest.mark.parametrize("text", ["import apps\n", "import apps.other\n", 'f"apps.{name}.main"\n'])
def test_a_name_that_the_wheel_lacks_ends_the_build(text: str) -> None:
    with pytest.raises(ValueError, match="has no place for it"):
        hatch_build.renamed(text, Path("x.py"))


def test_the_wheel_has_the_apps_and_no_tests() -> None:
    files = hatch_build.laid_out(ROOT / "apps")
    assert {
        "tessera_apps/__init__.py",
        "tessera_apps/apps/__init__.py",
        "tessera_apps/apps/grpo/recipes/math.py",
    } <= set(files)
    assert "tessera_apps/apps/quickstart/chat_template.jinja" in files
    assert not [name for name in files if name.endswith("_test.py") or "/testing/" in name or "/tests/" in name]
    for path in (ROOT / "apps").glob("*/__init__.py"):
        assert f"tessera_apps/apps/{path.parent.name}/__init__.py" in files or path.parent.name == "tessera_apps"
