"""Tests of the site's pages: the menu has every page, and links of the tree lead somewhere in it."""

from pathlib import Path

from docs.pages_of_site import chapters, linked, menu, public_names, reference

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_menu_once() -> None:
    pages = [page for part in chapters(ROOT).values() for page in part]
    assert len(pages) == len(set(pages))
    written = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert written == {page for page in pages if page.startswith("docs/")}


def test_the_menu_for_readers_of_files_is_the_same() -> None:
    """`python docs/pages_of_site.py` writes it."""
    assert (ROOT / "docs/README.md").read_text(encoding="utf-8") == menu(ROOT)


def test_links_stay_where_a_page_is_and_lose_what_is_none() -> None:
    pages = ["README.md", "docs/a.md", "libs/x/README.md"]
    text = "[one](../libs/x/README.md#two) [`code`](../libs/x/x/code.py), "
    text += "[web](https://a.org/b) ![p](plan.svg) [here](#part)"
    want = "[one](../libs/x/README.md#two) `code`, [web](https://a.org/b) p [here](#part)"
    assert linked(text, "docs/a.md", pages) == want
    assert linked("[a](docs/a.md) [b](docs/b.md)", "README.md", pages) == "[a](docs/a.md) b"


def test_public_names_are_those_of_the_library() -> None:
    text = "from typing import Any\nif TYPE_CHECKING:\n    from x.b import f as f\n"
    text += "    from x.a import C as D\nfrom x import _own, mod"
    assert public_names(text, "x") == ["x.a.C", "x.b.f", "x.mod"]
    assert reference("x", text).count(":::") == 3
