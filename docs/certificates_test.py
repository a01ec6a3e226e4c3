"""The tables of docs/certificates.md and of the engines' README are those of one JSON file, which has every type of
transformers."""

import re
from pathlib import Path

import pytest

from apps.common.cli.untested import NAMES
from engines.proofs.every_type import (
    LIBRARY_PAGE,
    VERDICTS,
    TypeResult,
    all_types,
    apart,
    read,
    table,
    tables,
    with_table,
)
from engines.proofs.opened import GRADIENTS

DOCS = Path(__file__).parent


def test_pages_have_the_table_of_their_file_and_every_type() -> None:
    results = read(DOCS / "benchmarks" / "certificates.json")
    for page, lines in tables(DOCS, results).items():
        text = page.read_text(encoding="utf-8")
        assert with_table(text, lines) == text, page
    assert [one.type for one in results] == all_types()
    for one in results:
        assert one.verdict in VERDICTS
        assert bool(one.reason) == (one.verdict in ("padded", "refused", "not built")), one
        if one.verdict != "padded":
            assert bool(one.not_exercised) == (one.verdict == "equal in part"), one
        if one.verdict not in ("refused", "not built"):
            assert one.step is not None, one
            assert one.step <= GRADIENTS, one
        if one.verdict.startswith("equal"):
            assert one.log_probs is not None
            assert one.gradients is not None
            assert one.log_probs <= 3e-5
            assert one.gradients <= 1e-3


def test_a_row_names_fields_that_were_not_exercised_and_marks_are_needed() -> None:
    (row,) = [line for line in table([TypeResult("a", True, "equal in part", not_exercised=("x",))]) if "`a`" in line]
    assert row.endswith("| 0 | 1 | `a` (x) |")
    with pytest.raises(ValueError, match="the page has no <!-- table"):
        with_table("text", [])


def test_the_readme_counts_the_types_of_each_verdict() -> None:
    rows = [TypeResult("a", True, "equal in part", not_exercised=("x",)), TypeResult("b", False, "refused", reason="y")]
    head, _, *lines = tables(DOCS, [*rows, TypeResult("c", False, "refused")])[DOCS.parent / LIBRARY_PAGE]
    columns = head.split(" | ")[1:]
    for line, verdict, count in zip(lines, ("refused", "equal in part"), ("2", "1"), strict=True):
        numbers = dict(zip(columns, line.split(" | ")[1:], strict=True))
        assert {name: number for name, number in numbers.items() if number.strip(" |") != "0"} == {verdict: count}


def test_a_proof_that_takes_too_long_is_stopped() -> None:
    assert apart("llama", limit=0.0).reason == "it took longer than 0 s"


def test_the_page_has_each_name_that_a_run_can_accept() -> None:
    rows = re.findall(r"^\| `(\w+)` \| .+ \|$", (DOCS / "certificates.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(NAMES)
