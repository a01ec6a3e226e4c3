"""Draw docs/benchmark_history.md, and tables in pages, from docs/benchmarks: `./bazelw run //docs:draw_benchmarks`.

A file is one benchmark: what it measures, its command, and its runs, each with date, device, versions and values by
case. A new run is added to its file; what an older one measured stays. A file of one run may have no list of runs.
Pages have the newest run of each case and device, between `<!-- figures: NAME -->` and `<!-- end of figures -->`.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = """# Benchmarks: history

Drawn from the files of [benchmarks](benchmarks) by `./bazelw run //docs:draw_benchmarks`; a test holds this page to
them. Each case has its runs in the order of their dates. Runs of different devices or versions say nothing about one
another. A new measurement is a further run in its file (`docs/benchmarks/NAME.json`): date, device, versions and values
by case. Tables of other pages have the newest run of each case and device.
"""
PAGE = Path("docs/benchmark_history.md")
DRAWN = re.compile(r"<!-- figures: (\w+) -->\n(.*?)<!-- end of figures -->", re.S)


@dataclass(frozen=True)
class Run:
    """One run of a benchmark."""

    date: str
    device: str
    versions: Mapping[str, str]
    values: Mapping[str, Mapping[str, Any]]
    note: str = ""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark with all its runs."""

    name: str
    what: str
    command: str
    runs: Sequence[Run]


def read(path: Path) -> Benchmark:
    """Return the benchmark of a file.

    Raises:
        ValueError: a run lacks its date, device, versions or values.
    """
    file = json.loads(path.read_text(encoding="utf-8"))
    runs = [_run(path.name, entry) for entry in file.get("runs", [file])]
    return Benchmark(path.stem, file.get("what", ""), file["command"], sorted(runs, key=lambda run: run.date))


def _run(name: str, entry: Mapping[str, Any]) -> Run:
    entry = {**entry, **_certificates(entry)} if "types" in entry else entry
    lacking = [key for key in ("date", "device", "versions", "values") if key not in entry]
    if lacking:
        raise ValueError(f"{name}: a run without {', '.join(lacking)}")
    return Run(entry["date"], entry["device"], entry["versions"], entry["values"], entry.get("note", ""))


def _certificates(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file of all types of models as values: how many have each verdict."""
    verdicts = [one["verdict"] for one in entry["types"]]
    values = {verdict: {"types": verdicts.count(verdict)} for verdict in dict.fromkeys(sorted(verdicts))}
    return {"versions": {name: entry[name] for name in ("torch", "transformers")}, "values": values}


def page(benchmarks: Sequence[Benchmark]) -> str:
    """Return the text of the page."""
    return "\n".join([HEAD, *(line for benchmark in benchmarks for line in section(benchmark))])


def section(benchmark: Benchmark) -> Iterator[str]:
    """Yield the lines of one benchmark: words, a table of cases by date, and the runs below it."""
    yield f"## [{benchmark.name}](benchmarks/{benchmark.name}.json)"
    yield ""
    if benchmark.what:
        yield f"{benchmark.what}\n"
    columns = list(dict.fromkeys(c for run in benchmark.runs for case in run.values.values() for c in case))
    yield f"| case | date | device | {' | '.join(columns)} |"
    yield f"| --- | --- | --- | {' | '.join('---' for _ in columns)} |"
    for case in dict.fromkeys(case for run in benchmark.runs for case in run.values):
        for run in benchmark.runs:
            if case in run.values:
                cells = [_cell(run.values[case].get(column)) for column in columns]
                yield f"| {case} | {run.date} | {run.device} | {' | '.join(cells)} |"
    yield ""
    yield f"`{benchmark.command}`:"
    for run in benchmark.runs:
        versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
        yield f"- {run.date}, {run.device}: {versions or 'versions not recorded'}{f'; {run.note}' if run.note else ''}"
    yield ""


def latest(benchmark: Benchmark) -> list[tuple[str, Run, Mapping[str, Any]]]:
    """Return case, run and values of the newest run of each case on each device, in the order of the cases."""
    newest = {(case, run.device): (case, run, values) for run in benchmark.runs for case, values in run.values.items()}
    order = list(dict.fromkeys(case for case, _ in newest))
    return sorted(newest.values(), key=lambda row: order.index(row[0]))


def table(benchmark: Benchmark, history: str) -> Iterator[str]:
    """Yield the lines of one benchmark in a page: words, the newest values, and what measured them."""
    rows = latest(benchmark)
    columns = list(dict.fromkeys(column for _, _, values in rows for column in values))
    several = len({run.device for _, run, _ in rows}) > 1
    heads = ["case", *(["device"] if several else []), *columns]
    yield f"{benchmark.what}\n"
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for case, run, values in rows:
        cells = [*([run.device] if several else []), *(_cell(values.get(column)) for column in columns)]
        yield f"| {case} | {' | '.join(cells)} |"
    devices: dict[str, list[str]] = {}
    for _, run, _ in rows:
        devices.setdefault(_told(run), []).append(run.device)
    by = "; ".join(f"{', '.join(dict.fromkeys(names))}{told}" for told, names in devices.items())
    yield f"\n{by}: `{benchmark.command}` ([all runs]({history}#{benchmark.name}))"


def _told(run: Run) -> str:
    words = "".join(f", {name} {version}" for name, version in run.versions.items())
    return f"{words} ({run.note})" if run.note else words


def pages_of(root: Path) -> list[Path]:
    """Return the pages and READMEs whose figures are held to docs/benchmarks, of which some have drawn tables."""
    patterns = ("README.md", "docs/*.md", "libs/*/README.md", "libs/*/MEASURED.md", "apps/**/README.md")
    return [path for pattern in patterns for path in sorted(root.glob(pattern)) if path.name != PAGE.name]


def with_tables(path: Path, text: str, benchmarks: Mapping[str, Benchmark]) -> str:
    """Return the text of a page, whose path is from the tree's root, with its tables drawn anew."""
    history = os.path.relpath(PAGE, path.parent)

    def drawn(match: re.Match[str]) -> str:
        lines = "\n".join(table(benchmarks[match[1]], history))
        return f"<!-- figures: {match[1]} -->\n\n{lines}\n\n<!-- end of figures -->"

    return DRAWN.sub(drawn, text)


def drawn_names(text: str) -> set[str]:
    """Return the names of the benchmarks whose tables a page has."""
    return {match[1] for match in DRAWN.finditer(text)}


def without_drawn(text: str) -> str:
    """Return a page without the tables that are drawn, here or from docs/benchmarks/certificates.json."""
    return re.sub(r"<!-- table: (\w+) -->\n.*?<!-- end of table -->", "", DRAWN.sub("", text), flags=re.S)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def main() -> None:
    """Write the page, and the tables of the others."""
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    benchmarks = {path.stem: read(path) for path in sorted(Path("docs/benchmarks").glob("*.json"))}
    PAGE.write_text(page(list(benchmarks.values())), encoding="utf-8")
    print(PAGE)
    for path in pages_of(Path()):
        text = path.read_text(encoding="utf-8")
        drawn = with_tables(path, text, benchmarks)
        if drawn != text:
            path.write_text(drawn, encoding="utf-8")
            print(path)


if __name__ == "__main__":
    main()
