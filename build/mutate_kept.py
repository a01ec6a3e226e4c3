"""Verdicts kept between runs: a library is measured in several short runs, and after a change only what it touches.

A file's verdicts are forgotten when the file changes. When a test changes, mutants that survived or that no test
reached are run again, before all others, and count as survivors until then: else a sample in several runs would keep
its kills and lose its survivors. What was killed stays so, since tests are added far more often than taken away:
measure without `--keep` where that does not hold.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mutate_report import KILLED, TIMEOUT
from mutate_tree import Group


@dataclass(frozen=True)
class Kept:
    """The verdicts in `page` (a JSON file; None keeps nothing) that are for these sources and tests.

    `sources`: a digest by file. `codes`: by file, the exit codes of mutants by their names, as mutmut stores them.
    `again`: by file, the mutants that no test killed, and whose verdict the tests of today have to give.
    """

    page: Path | None
    sources: Mapping[str, str]
    tests: str
    codes: Mapping[str, Mapping[str, int]]
    again: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, page: Path | None, top: Path, group: Group) -> "Kept":
        """Return the entries of a page that still hold; none without a page."""
        sources = {str(file): digest([top / file]) for file in group.files}
        tests = digest(top / test for test in group.tests)
        entries = json.loads(page.read_text(encoding="utf-8")) if page is not None and page.exists() else {}
        codes, again = {}, {}
        for file, source in sources.items():
            entry = entries.get(file, {})
            if entry.get("source") == source:
                sure = KILLED | TIMEOUT if entry["tests"] != tests else None
                codes[file] = {n: code for n, code in entry["codes"].items() if sure is None or code in sure}
                again[file] = frozenset(entry["codes"].keys() - codes[file].keys()) | frozenset(entry.get("again", ()))
        return cls(page, sources, tests, codes, again)

    @property
    def first(self) -> frozenset[str]:
        """The names of all mutants in `again`."""
        return frozenset().union(*self.again.values())

    def restore(self, place: Path, files: Mapping[str, str]) -> None:
        """Write the codes into mutmut's files in `place`; `files`: path in the copy -> path in the tree."""
        for copied, file in files.items():
            meta = _meta(place, copied)
            if not meta.exists():
                continue
            data = json.loads(meta.read_text(encoding="utf-8"))
            known = self.codes.get(file, {})
            data["exit_code_by_key"] = {n: known.get(n, code) for n, code in data["exit_code_by_key"].items()}
            meta.write_text(json.dumps(data), encoding="utf-8")

    def save(self, place: Path, files: Mapping[str, str]) -> None:
        """Write mutmut's present codes to the page, beside those of other files."""
        if self.page is None:
            return
        entries = json.loads(self.page.read_text(encoding="utf-8")) if self.page.exists() else {}
        for copied, file in files.items():
            meta = _meta(place, copied)
            if meta.exists():
                codes = json.loads(meta.read_text(encoding="utf-8"))["exit_code_by_key"]
                run = {name: code for name, code in codes.items() if code is not None}
                again = sorted(self.again.get(file, frozenset()) - run.keys())
                entries[file] = {"source": self.sources[file], "tests": self.tests, "codes": run, "again": again}
        self.page.write_text(json.dumps(entries), encoding="utf-8")


def digest(paths: Iterable[Path]) -> str:
    """Return a digest of the files' contents, in the order of their names."""
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(paths)]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _meta(place: Path, copied: str) -> Path:
    return place / "mutants" / f"{copied}.meta"
