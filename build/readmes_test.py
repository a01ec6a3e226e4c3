"""READMEs and pages are as readmes.py wants them, and a planted fault of each kind is found and named."""

from pathlib import Path

import pytest
from readmes import CHECKS, check_links, check_numbers, check_peers, readmes

ROOT = Path(__file__).absolute().parents[1]


def test_the_libraries_pages_are_so() -> None:
    """Links are for check_tree, which sees every file."""
    assert len(readmes(ROOT)) == 9
    assert len(list((ROOT / "docs").glob("*.md"))) > 15
    assert [complaint for check in CHECKS if check is not check_links for complaint in check(ROOT)] == []


def tree(root: Path) -> Path:
    """Write a small tree without a fault."""
    texts = {
        "README.md": '# A\n\n[design](docs/architecture.md#rules)\n\n<img src="docs/a.png">\n',
        "docs/a.png": "",
        "docs/architecture.md": "[status](status.md), [elsewhere](https://a.invalid), [below](#rules)\n",
        "docs/status.md": f"{'word ' * 120}\n- {'word ' * 120}\n| {'word ' * 121} |\n",
        "docs/use-it.md": "```python\nnames[0](missing)\n```\n",
        "docs/add-a-recipe.md": "x\n",
        "docs/decisions/why.md": "2026-01-02\n",
        "libs/a/README.md": f"[use](../../docs/use-it.md)\n\n| {'x' * 200} |\n\n```\n{'y' * 200}\n```\n",
    }
    texts["docs/architecture.md"] += "[recipe](add-a-recipe.md)\n"
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def complaints(root: Path) -> list[str]:
    """All of them."""
    return [complaint for check in CHECKS for complaint in check(root)]


def test_a_tree_without_a_fault_has_no_complaint(tmp_path: Path) -> None:
    assert complaints(tree(tmp_path)) == []


PLANTED = [
    ("libs/a/README.md", "x\n" * 60, "libs/a/README.md: 68 lines on a screen of 160 columns, more than 60"),
    (
        "libs/a/README.md",
        f"| {'x' * 160 * 52} |\n",
        "libs/a/README.md: 61 lines on a screen of 160 columns, more than 60",
    ),
    ("libs/a/README.md", "z" * 161, "libs/a/README.md:8: 161 characters, more than 160"),
    ("README.md", "word\n\n" * 900, "README.md: 904 words, more than 900"),
    ("docs/new.md", "x\n", "docs/new.md: linked from no README and not from docs/architecture.md"),
    ("docs/status.md", "[gone](gone.md#x)\n", "docs/status.md: gone.md#x leads nowhere"),
    (
        "docs/use-it.md",
        "`pip install torch 'tessera-a[x]'`\n",
        'docs/use-it.md:4: "pip install torch \'tessera-a": they are on no index yet, write ./libs/NAME',
    ),
    ("README.md", '<img src="docs/gone.png">\n', "README.md: docs/gone.png leads nowhere"),
    ("libs/a/README.md", "[m](MEASURED.md)\n", "libs/a/README.md: MEASURED.md leads nowhere"),
    ("docs/status.md", "word\n" * 121, "docs/status.md:4: a paragraph of 121 words, more than 120"),
    ("docs/use-it.md", f"- {'[a b](#x) ' * 61}\n", "docs/use-it.md:4: a paragraph of 122 words, more than 120"),
    ("docs/status.md", "on 2026-01-02\n", "docs/status.md:4: 2026-01-02: dates stand in docs/benchmarks alone"),
]


@pytest.mark.parametrize(("name", "added", "complaint"), PLANTED)
def test_a_planted_fault_is_named(tmp_path: Path, name: str, added: str, complaint: str) -> None:
    path = tree(tmp_path) / name
    path.write_text((path.read_text() if path.exists() else "") + added)
    assert complaints(tmp_path) == [complaint]


def test_how_to_use_a_library_stands_in_its_readme(tmp_path: Path) -> None:
    """The page that lists everything is not enough."""
    root = tree(tmp_path)
    (root / "docs/bring-it.md").write_text("x\n")
    (root / "README.md").write_text("[bring](docs/bring-it.md)\n")
    assert complaints(root) == ["docs/bring-it.md: linked from no library's README"]


def test_a_cell_that_the_peers_file_does_not_say_is_named() -> None:
    front = "A 1.0 says:\n| | Tessera | A | B |\n| --- | --- | --- | --- |\n| Speed | 3 | 1 | 2 |\n"
    rows = [{"row": "Speed", "cells": {"A": {"says": "1"}, "B": {"says": "2"}}}]
    peers = {"peers": {"A": {"version": "1.0"}, "B": {}}, "rows": rows}
    assert check_peers(front, peers) == []
    assert check_peers(front.replace("| 2 |", "| 4 |").replace("1.0", "0.9"), peers) == [
        "README.md: Speed of B is '4', docs/peers.json: '2'",
        "README.md: A 1.0 is not named",
    ]
    assert len(check_peers("A 1.0", peers)) == 2


def test_a_stale_number_of_the_front_page_is_named() -> None:
    front = "| | us | them |\n| Property-based tests, files | over 20 | 0 |\n| Longest Python file, lines | 3 | 9 |\n"
    sources = {f"a{n}_test.py": "import x\n    @given(x)\n" for n in range(21)} | {"b.py": "@given(x)\n2\n3\n"}
    assert check_numbers(front, sources) == []
    assert check_numbers(front, sources | {"c_test.py": "@given\n"}) == []
    more = sources | {f"c{n}_test.py": "@given(\n" for n in range(20)} | {"d.py": "\n" * 4}
    assert check_numbers(front, more) == [
        "README.md: Property-based tests, files is 'over 20', the tree says 'over 40'",
        "README.md: Longest Python file, lines is '3', the tree says '4'",
    ]
    assert len(check_numbers("", sources)) == 2
