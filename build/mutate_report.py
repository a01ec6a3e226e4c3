"""The results of mutmut: verdicts by file, diffs of what survived, equivalent mutants, the table."""

import ast
import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Exit codes of pytest in a mutant's process, as mutmut stores them; None: not run.
KILLED = frozenset({1, 3, -11, -9})
TIMEOUT = frozenset({-24, 24, 36, 152, 255})
UNTESTED = frozenset({5, 33})
STRICT = re.compile(r",\s*strict=\w+|,\s*(?=\))")


@dataclass(frozen=True)
class Mutant:
    """One change of one function. `diff`: lines "-old" and "+new", without blanks around them."""

    file: str
    name: str
    verdict: str
    diff: tuple[str, ...] = ()


@dataclass(frozen=True)
class Equivalent:
    """A change that no test can notice, and why. `change`: the mutant's diff."""

    file: str
    change: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Row:
    """The counts of one file; `total` without equivalent mutants, of which `measured` were run."""

    file: str
    total: int
    measured: int
    killed: int
    timeout: int
    survived: int
    untested: int
    equivalent: int

    @property
    def score(self) -> float | None:
        """Share of the measured mutants that a test noticed; None where none was measured."""
        return (self.killed + self.timeout) / self.measured if self.measured else None


def verdict_of(code: int | None) -> str:
    """Return killed, timeout, survived, untested (no test runs the function) or waiting (not run)."""
    if code is None or code == 2:
        return "waiting"
    for verdict, codes in (("killed", KILLED), ("timeout", TIMEOUT), ("untested", UNTESTED)):
        if code in codes:
            return verdict
    return "survived" if code == 0 else "killed"


def read_mutants(place: Path, files: Mapping[str, str]) -> list[Mutant]:
    """Return the mutants of a finished or stopped run in `place`; `files`: path in the copy -> path in the tree."""
    mutants = []
    for copied, file in files.items():
        meta = place / "mutants" / f"{copied}.meta"
        if not meta.exists():
            continue
        codes: dict[str, int | None] = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
        functions = functions_of((place / "mutants" / copied).read_text(encoding="utf-8"))
        for name, code in codes.items():
            mangled = name.rpartition(".")[2]
            original = functions.get(re.sub(r"__mutmut_\d+$", "__mutmut_orig", mangled), ())
            mutant = Mutant(file, name, verdict_of(code), diff_of(original, functions.get(mangled, ())))
            if not is_own_check(mutant.diff):
                mutants.append(mutant)
    return mutants


def is_own_check(diff: Sequence[str]) -> bool:
    """Return whether only `strict=` of a zip changes: a check of our own that, like an assert, never fails."""
    old, new = ([STRICT.sub("", line[1:]) for line in diff if line[0] == sign] for sign in "-+")
    return bool(old) and old == new


def functions_of(source: str) -> dict[str, tuple[str, ...]]:
    """Return the lines of every function by its name, without the one that names it."""
    lines = source.splitlines()
    return {
        node.name: tuple(
            re.sub(r"__mutmut_(orig|\d+)\b", "", line) for line in lines[node.lineno - 1 : node.end_lineno]
        )
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def diff_of(old: Sequence[str], new: Sequence[str]) -> tuple[str, ...]:
    """Return the lines that differ: "-old", "+new", without blanks around the code."""
    lines = difflib.unified_diff(old, new, lineterm="", n=0)
    return tuple(line[0] + line[1:].strip() for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---"))


def library_of(file: str) -> str:
    """Return the name of the page of a file's equivalent mutants: libs/NAME/... -> NAME, apps/... -> apps."""
    first, second = Path(file).parts[:2]
    return second if first == "libs" else first


def read_equivalents(folder: Path) -> list[Equivalent]:
    """Return the equivalent mutants of a folder's pages: NAME.toml for libs/NAME, apps.toml for apps.

    ValueError for an entry without a reason, and for one on another library's page.
    """
    equivalents = []
    for page in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(page.read_text(encoding="utf-8")).get("equivalent", []):
            if not entry.get("reason", "").strip() or set(entry) != {"file", "change", "reason"}:
                raise ValueError(f"{page}: an entry has file, change and reason, got {entry}")
            if library_of(entry["file"]) != page.stem:
                raise ValueError(f"{page}: {entry['file']} belongs on {library_of(entry['file'])}.toml")
            equivalents.append(Equivalent(entry["file"], tuple(entry["change"]), entry["reason"]))
    return equivalents


def name_equivalents(mutants: Iterable[Mutant], known: Iterable[Equivalent]) -> list[Mutant]:
    """Return the mutants; survivors that are known to be equivalent get that verdict."""
    changes = {(entry.file, entry.change) for entry in known}
    return [
        Mutant(mutant.file, mutant.name, "equivalent", mutant.diff)
        if mutant.verdict == "survived" and (mutant.file, mutant.diff) in changes
        else mutant
        for mutant in mutants
    ]


def stale(mutants: Sequence[Mutant], known: Iterable[Equivalent]) -> list[Equivalent]:
    """Return the entries of mutated files that name no mutant, or one that a test kills, and are to be removed."""
    verdicts = {(mutant.file, mutant.diff): mutant.verdict for mutant in mutants}
    files = {mutant.file for mutant in mutants}
    return [
        entry
        for entry in known
        if entry.file in files and verdicts.get((entry.file, entry.change)) not in ("equivalent", "waiting")
    ]


def rows_of(mutants: Iterable[Mutant]) -> list[Row]:
    """Return a row a file, in the order of their names."""
    by_file: dict[str, list[str]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, []).append(mutant.verdict)
    rows = []
    for file, verdicts in sorted(by_file.items()):
        counts = {name: verdicts.count(name) for name in ("killed", "timeout", "survived", "untested", "equivalent")}
        total = len(verdicts) - counts["equivalent"]
        rows.append(Row(file=file, total=total, measured=total - verdicts.count("waiting"), **counts))
    return rows


def together(rows: Sequence[Row], name: str = "together") -> Row:
    """Return the sum of rows."""
    fields = ("total", "measured", "killed", "timeout", "survived", "untested", "equivalent")
    return Row(name, *(sum(getattr(row, field) for row in rows) for field in fields))


HEAD = "| file | mutants | measured | killed | timeout | survived | untested | equivalent | score |"
RULE = "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"


def values_of(row: Row) -> dict[str, float]:
    """Return the counts of a file as the values of a benchmark, with the score in percent."""
    values: dict[str, float] = {"mutants": row.total, "measured": row.measured, "killed": row.killed}
    values |= {name: getattr(row, name) for name in ("timeout", "survived", "untested", "equivalent")}
    return values if row.score is None else {**values, "score %": round(100 * row.score, 1)}


def line_of(row: Row) -> str:
    """Return a row of the Markdown table."""
    values = values_of(row)
    score = f"{values.pop('score %')} %" if row.score is not None else ""
    return f"| {row.file} | {' | '.join(map(str, values.values()))} | {score} |"


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of these rows, and of their sum."""
    return "\n".join([HEAD, RULE, *(line_of(row) for row in [*rows, together(rows, "**together**")])])


def recorded(text: str, rows: Sequence[Row], date: str, device: str) -> str:
    """Return the text of docs/benchmarks/mutation.json with these rows in the run of a date and a device."""
    file = json.loads(text)
    run = next((one for one in file["runs"] if (one["date"], one["device"]) == (date, device)), None)
    if run is None:
        run = {"date": date, "device": device, "versions": {}, "values": {}}
        file["runs"].append(run)
    run["values"] |= {row.file: values_of(row) for row in rows}
    run["values"] = dict(sorted(run["values"].items()))
    return json.dumps(file, indent=1) + "\n"
