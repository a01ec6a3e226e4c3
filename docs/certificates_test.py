"""The table of docs/certificates.md is that of its JSON file, which has every type of transformers."""

from pathlib import Path

import pytest

from engines.proofs.every_type import VERDICTS, TypeResult, all_types, apart, read, table, with_tables

DOCS = Path(__file__).parent


def test_the_page_has_the_table_of_its_file_and_every_type() -> None:
    results = read(DOCS / "benchmarks" / "certificates.json")
    page = (DOCS / "certificates.md").read_text(encoding="utf-8")
    assert with_tables(page, results) == page
    assert [one.type for one in results] == all_types()
    for one in results:
        assert one.verdict in VERDICTS
        assert bool(one.reason) == (one.verdict in ("refused", "not built")), one
        assert bool(one.not_exercised) == (one.verdict == "equal in part"), one
        if one.verdict.startswith("equal"):
            assert one.log_probs is not None
            assert one.gradients is not None
            assert one.log_probs <= 3e-5
            assert one.gradients <= 1e-3


def test_a_row_names_fields_that_were_not_exercised_and_marks_are_needed() -> None:
    (row,) = [line for line in table([TypeResult("a", True, "equal in part", not_exercised=("x",))]) if "`a`" in line]
    assert row.endswith("| 0 | 1 | `a` (x) |")
    with pytest.raises(ValueError, match="the page has no <!-- table"):
        with_tables("text", [])


def test_a_proof_that_takes_too_long_is_stopped() -> None:
    assert apart("llama", limit=0.0).reason == "it took longer than 0 s"
