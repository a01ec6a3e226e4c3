"""Measured figures of pages: each stands in a file of docs/benchmarks.

docs/figures.toml names for each page the benchmarks of which it speaks, and under `fixed` the figures that are no
measurements (goals, arithmetic), as the page writes them. A figure is a number with a unit, in words or in a table
whose head has the unit, a count ("3 of 4"), or any other number in digits. It has to be the newest value of one of
those benchmarks, in a column of that unit or of none, rounded as the page rounds it. No figures are

1. what is in code type: a setting, a bound of a test, an example; and tables that are drawn from a file;
2. 0, 1 and -1;
3. a part of a name (SHA-256, #64), or what follows a name of `names` in docs/figures.toml: a version (Python 3.13);
4. the size of what was set up, before a word of `sizes` there (2 ranks).
"""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from pathlib import Path

from draw_benchmarks import Benchmark, drawn_names, latest, pages_of, read, with_tables, without_drawn

UNITS = {
    "a second": r"tokens/s|GB/s|(?:\w+ )?(?:a|per) second",
    "s": r"s|seconds?",
    "ms": r"ms",
    "minutes": r"minutes?",
    "hours": r"hours?",
    "%": r"%",
    "GiB": r"GiB",
    "MiB": r"MiB",
    "MB": r"MB",
    "GB": r"GB",
    "times": r"times|ratio",
}
NUMBER = r"(?:\d[\d,]*\d|\d+)(?:\.\d+)?(?:e[-+]?\d+)?"
BETWEEN = r"(?:,? and |,? or |, | to | against | -> | x | \+ |-)"
NUMBERS = rf"{NUMBER}(?:{BETWEEN}{NUMBER})*"
FIGURE = re.compile(rf"(?<![\w.,]){NUMBERS}(?: ?%|[ -](?:{'|'.join(UNITS.values())})(?!\w))")
COUNT = re.compile(rf"(?<![\w.,]){NUMBER} of (?:the )?{NUMBER}(?![\w%]| ?%)")
LONE = re.compile(rf"(?<![\w.,#])(?<!\w-){NUMBER}(?![\w,.]*\w)(?!-[A-Za-z])")
CODE = re.compile(
    r"^```.*?^```$|^ {4,}(?:--|[.\w`]).*?$|(?<!`)`[^`\n]+`|<!--.*?-->|</?[a-z][^>]*>|(?<=\])\([^)\s]+\)|^ *\d+\. ",
    re.M | re.S,
)
RULE = re.compile(r"\|[ :|-]+\|")


@dataclass(frozen=True)
class PageFigures:
    """What stands in docs/figures.toml about a page."""

    benchmarks: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pages:
    """docs/figures.toml: what stands there about each page, and of all pages."""

    entries: Mapping[str, PageFigures]
    names: Sequence[str] = ()
    """Names that a version or a size follows."""
    sizes: Sequence[str] = ()
    """What is set up before something is measured, in numbers."""
    drawn: Sequence[str] = ()
    """Pages that a program writes from data of their own."""

    @cached_property
    def no_figures(self) -> re.Pattern[str]:
        """The numbers that are no figures by their names or sizes."""
        names, sizes = ("|".join(re.escape(word) for word in words) or "(?!)" for words in (self.names, self.sizes))
        return re.compile(
            rf"(?<![\w.,])(?:{names})(?:'s)?[ -]\(?{NUMBERS}|(?<![\w.,]){NUMBERS} (?:{sizes})(?!\w)|"
            rf"(?<![\w.,])-?[01](?![\w.,]*\w)"
        )


@dataclass(frozen=True)
class Figure:
    """Numbers with one unit, as a page writes them."""

    text: str
    numbers: tuple[str, ...]
    unit: str


def read_pages(path: Path) -> Pages:
    """Return docs/figures.toml."""
    file = tomllib.loads(path.read_text(encoding="utf-8"))
    words = {key: tuple(file.pop(key)) for key in ("names", "sizes", "drawn")}
    entries = {page: PageFigures(**{key: tuple(value) for key, value in one.items()}) for page, one in file.items()}
    return Pages(entries, **words)


def unit_of(text: str) -> str | None:
    """Return the unit in the name of a column, or in a figure; None where there is none."""
    return next((unit for unit, words in UNITS.items() if re.search(rf"(?<![\w/'])(?:{words})(?!\w)", text)), None)


def figures(text: str, pages: Pages) -> Iterator[Figure]:
    """Yield the figures of a page: those with a unit behind them, the cells of columns whose head has one, counts, and
    other numbers in digits."""
    text = CODE.sub(lambda code: re.sub(r"[^\n|]", " ", code[0]), without_drawn(text))
    head: list[str] = []
    words: list[str] = []
    before: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        in_columns: dict[int, Figure] = {}
        if RULE.fullmatch(line.strip()):
            head = before
        elif head and cells:
            in_columns = _cells(head, cells)
            yield from in_columns.values()
        head = head if cells else []
        before = cells
        words += ["", *(cell for place, cell in enumerate(cells) if place not in in_columns), ""] if cells else [line]
    text = re.sub(r"(?<=\S) *\n *(?=\S)", " ", "\n".join(words))
    for pattern in (FIGURE, COUNT, pages.no_figures, LONE):
        for match in pattern.finditer(text) if pattern is not pages.no_figures else ():
            yield Figure(match[0], tuple(re.findall(NUMBER, match[0])), unit_of(match[0]) or "")
        text = pattern.sub(" ~ ", text)


def _cells(head: Sequence[str], cells: Sequence[str]) -> dict[int, Figure]:
    """Return the figures of a row in columns with a unit, by column."""
    by_column = {}
    for place, (name, cell) in enumerate(zip(head[1:], cells[1:], strict=False), 1):
        unit, numbers = unit_of(name), LONE.findall(cell)
        if unit is not None and numbers and not FIGURE.search(cell):
            by_column[place] = Figure(f"{cell} {name}", tuple(numbers), unit)
    return by_column


def newest(benchmark: Benchmark) -> list[tuple[str | None, float]]:
    """Return the newest numbers of a benchmark, with the units of their columns, and those of its cases."""
    numbers: list[tuple[str | None, float]] = []
    for case, _, values in latest(benchmark):
        numbers += [(None, float(one.replace(",", ""))) for one in re.findall(NUMBER, case)]
        for column, value in values.items():
            if isinstance(value, str):
                numbers += [(unit_of(column), float(one.replace(",", ""))) for one in re.findall(NUMBER, value)]
            elif isinstance(value, int | float):
                numbers.append((unit_of(column), float(value)))
    return numbers


def is_measured(number: str, unit: str, known: Sequence[tuple[str | None, float]]) -> bool:
    """Return whether a number is one of the known, rounded to its own digits; a share may be written in percent."""
    value = float(number.replace(",", ""))
    margin = 0.5 * 10.0 ** int(Decimal(number.replace(",", "")).as_tuple().exponent) * (1 + 1e-9)
    same = [other for column, other in known if column in (None, unit)]
    shares = [100 * other for column, other in known if column is None and unit == "%"]
    return any(abs(value - other) <= margin for other in [*same, *shares])


def complaints(page: str, text: str, pages: Pages, benchmarks: Mapping[str, Benchmark]) -> list[str]:
    """Return what is wrong with a page: figures of no benchmark, and entries that nothing uses."""
    entry = pages.entries.get(page, PageFigures())
    said = [f"{page}: {name} is no file of docs/benchmarks" for name in entry.benchmarks if name not in benchmarks]
    unknown = drawn_names(text) - set(benchmarks)
    said += [f"{page}: a table of {name}, which is no file of docs/benchmarks" for name in sorted(unknown)]
    if "<!-- figures: " in without_drawn(text):
        said.append(f"{page}: a table without its end: <!-- end of figures -->")
    known = {name: newest(benchmarks[name]) for name in entry.benchmarks if name in benchmarks}
    together = [number for numbers in known.values() for number in numbers]
    figures_of_page = list(figures(text, pages))
    measured = [figure for figure in figures_of_page if figure.text not in entry.fixed]
    for figure in measured:
        which = ", ".join(number for number in figure.numbers if not is_measured(number, figure.unit, together))
        if which:
            said.append(
                f"{page}: {figure.text!r}: {which} in none of its benchmarks, not fixed, and no rule of docs/figures.py"
            )
    for name, numbers in known.items():
        used = any(is_measured(number, figure.unit, numbers) for figure in measured for number in figure.numbers)
        if not used and name not in drawn_names(text):
            said.append(f"{page}: no figure of {name}")
    texts = {figure.text for figure in figures_of_page}
    gone = [text for text in entry.fixed if text not in texts]
    return said + [f"{page}: {text!r} does not stand there (docs/figures.toml)" for text in gone]


def check_figures(root: Path) -> list[str]:
    """Return complaints about all pages and READMEs, and about entries of docs/figures.toml without a page."""
    benchmarks = {path.stem: read(path) for path in sorted(root.glob("docs/benchmarks/*.json"))}
    pages = read_pages(root / "docs/figures.toml")
    texts = {str(path.relative_to(root)): path.read_text(encoding="utf-8") for path in pages_of(root)}
    said = [f"docs/figures.toml: there is no {page}" for page in (*pages.entries, *pages.drawn) if page not in texts]
    for page, text in texts.items():
        said += [] if page in pages.drawn else complaints(page, text, pages, benchmarks)
        if with_tables(Path(page), text, benchmarks) != text:
            said.append(f"{page}: its tables are not drawn anew: python docs/draw_benchmarks.py")
    return said
