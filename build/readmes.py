"""What a stranger reads first: libraries' READMEs fit a screen, every page is linked, every link leads somewhere."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LINES, WIDTH = 60, 160  # of a library's README; tables and code may be wider, and a row then takes more lines
FRONT_WORDS = 900  # of the front page
PARAGRAPH_WORDS = 120  # of a paragraph, or an item of a list
CODE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^()\s]+)\)|src=\"([^\"]+)\"")
PROPERTIES = re.compile(r"^\s*@given\(", re.M)
FROM_INDEX = re.compile(r"pip install [^`;]*\btessera-\w+")
HOW_TO = re.compile(r"(add|bring|from|use)-")
OF_THE_APPS = "add-a-recipe.md"
DATE = re.compile(r"\b20\d\d-[01]\d-[0-3]\d\b")
DATED = ("CHANGELOG.md", "docs/benchmark_history.md", "docs/decisions/")
INSIDE = ("*.md", "docs/**/*.md", "libs/*/*.md", "apps/**/*.md", "build/*.md", "third_party/*.md")
BEGINS = re.compile(r"\s*(?:[-*] |\d+\. |#|\||$)")


def without_code(text: str) -> str:
    """Return the same lines, with those of code empty."""
    return CODE.sub(lambda block: "\n" * block[0].count("\n"), text)


def targets(page: Path) -> dict[str, Path]:
    """Return the links of a page to files, as written, with their paths; symbolic links are not followed."""
    links = [one or other for one, other in LINK.findall(without_code(page.read_text()))]
    files = [link for link in links if not re.match(r"[a-z]+:|#", link)]
    return {link: Path(os.path.normpath(page.parent / link.partition("#")[0])) for link in files}


def readmes(root: Path) -> list[Path]:
    """Return the README of each library."""
    return sorted(root.glob("libs/*/README.md"))


def all_pages(root: Path) -> list[Path]:
    """Return all pages of the tree."""
    return sorted({page for pattern in INSIDE for page in root.glob(pattern)})


def screen_lines(text: str) -> int:
    """Return the number of lines of a page on a screen of WIDTH columns, where the rows of tables are wrapped."""
    return sum(max(1, -(-len(line) // WIDTH)) if line.startswith("|") else 1 for line in text.splitlines())


def check_screens(root: Path) -> list[str]:
    """Return complaints about READMEs of libraries that are too long or too wide."""
    complaints = []
    for path in readmes(root):
        name, lines = f"libs/{path.parent.name}/README.md", screen_lines(path.read_text())
        if lines > LINES:
            complaints.append(f"{name}: {lines} lines on a screen of {WIDTH} columns, more than {LINES}")
        for number, line in enumerate(without_code(path.read_text()).splitlines(), 1):
            if len(line) > WIDTH and not line.startswith("|"):
                complaints.append(f"{name}:{number}: {len(line)} characters, more than {WIDTH}")
    return complaints


def words(text: str) -> int:
    """Return the number of words, marks and links' targets left out."""
    return sum(any(letter.isalnum() for letter in word) for word in re.sub(r"\]\([^)]*\)", "]", text).split())


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and items of lists, each with the number of its first line; code and tables are left out."""
    start, lines = 0, list[str]()
    for number, line in enumerate([*without_code(text).splitlines(), ""], 1):
        if BEGINS.match(line):
            yield start, " ".join(lines)
            lines = []
        if not line.startswith("|"):
            start = start if lines else number
            lines.append(line)


def check_paragraphs(root: Path) -> list[str]:
    """Return complaints about pages with paragraphs of more than PARAGRAPH_WORDS words."""
    return [
        f"{page.relative_to(root)}:{number}: a paragraph of {words(text)} words, more than {PARAGRAPH_WORDS}"
        for page in all_pages(root)
        for number, text in paragraphs(page.read_text())
        if words(text) > PARAGRAPH_WORDS
    ]


def check_dates(root: Path) -> list[str]:
    """Return complaints about dates in pages: docs/benchmarks, decisions and the list of changes have them."""
    return [
        f"{page.relative_to(root)}:{number}: {date[0]}: dates stand in docs/benchmarks alone"
        for page in all_pages(root)
        if not page.relative_to(root).as_posix().startswith(DATED)
        for number, line in enumerate(page.read_text().splitlines(), 1)
        for date in DATE.finditer(line)
    ]


def check_front(root: Path) -> list[str]:
    """Return a complaint about a front page of more than FRONT_WORDS words, marks and links' targets left out."""
    number = words((root / "README.md").read_text())
    return [f"README.md: {number} words, more than {FRONT_WORDS}"] * (number > FRONT_WORDS)


def check_reached(root: Path) -> list[str]:
    """Return complaints about pages without a link: a library's README has to name what one does with it."""
    by_library = {path for page in readmes(root) for path in targets(page).values()}
    front = [root / "README.md", root / "docs/architecture.md"]
    reached = by_library.union(*(targets(page).values() for page in front))
    complaints = []
    for page in sorted(root.glob("docs/*.md")):
        if page not in reached and page.name != "architecture.md":
            complaints.append(f"docs/{page.name}: linked from no README and not from docs/architecture.md")
        elif HOW_TO.match(page.name) and page.name != OF_THE_APPS and page not in by_library:
            complaints.append(f"docs/{page.name}: linked from no library's README")
    return complaints


def check_installs(root: Path) -> list[str]:
    """Return complaints about pages that install our distributions from an index, none of which has them."""
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("libs/*/*.md")]
    return [
        f"{page.relative_to(root)}:{number}: {match[0]!r}: they are on no index yet, write ./libs/NAME"
        for page in sorted(pages)
        for number, line in enumerate(page.read_text().splitlines(), 1)
        if (match := FROM_INDEX.search(line))
    ]


def check_links(root: Path) -> list[str]:
    """Return complaints about links of READMEs and pages to files that do not exist."""
    return [
        f"{page.relative_to(root)}: {link} leads nowhere"
        for page in all_pages(root)
        for link, path in targets(page).items()
        if not path.exists()
    ]


def check_numbers(front: str, sources: Mapping[str, str]) -> list[str]:
    """Return complaints about numbers of the front page that differ from the tree's Python files, by name."""
    properties = sum(bool(PROPERTIES.search(text)) for name, text in sources.items() if name.endswith("_test.py"))
    longest = max(text.count("\n") for text in sources.values())
    rows = {
        "Property-based tests, files": f"over {(properties - 1) // 20 * 20}",  # one test more changes no page
        "Longest Python file, lines": str(longest),
    }
    lines = [[cell.strip() for cell in line.split("|")[1:3]] for line in front.splitlines() if line.startswith("|")]
    said = {cells[0]: cells[1] for cells in lines}
    return [
        f"README.md: {row} is {said.get(row)!r}, the tree says {number!r}"
        for row, number in rows.items()
        if said.get(row) != number
    ]


def check_peers(front: str, peers: Mapping[str, Any]) -> list[str]:
    """Return complaints about cells of the front page's table of other trainers that differ from docs/peers.json."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in front.splitlines() if line.startswith("|")]
    names = next((cells[2:] for cells in lines if cells[:2] == ["", "Tessera"]), [])
    said = {cells[0]: dict(zip(names, cells[2:], strict=False)) for cells in lines}
    complaints = [
        f"README.md: {row['row']} of {name} is {said.get(row['row'], {}).get(name)!r}, "
        f"docs/peers.json: {cell['says']!r}"
        for row in peers["rows"]
        for name, cell in row["cells"].items()
        if said.get(row["row"], {}).get(name) != cell["says"]
    ]
    versions = [f"{name} {peer['version']}" for name, peer in peers["peers"].items() if "version" in peer]
    return complaints + [f"README.md: {one} is not named" for one in versions if one not in front]


CHECKS = (check_front, check_screens, check_reached, check_links, check_installs, check_paragraphs, check_dates)
"""The checks of a tree's pages; those of the front page's numbers want more than its root."""
