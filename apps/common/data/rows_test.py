"""Rows of every kind of file, plain and packed; what can't be read is told by its place."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.common.data.rows import MOST_ERRORS, SUFFIXES, error_text, read_rows, stream_records

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\x00"), max_size=20)
ROWS = st.lists(st.fixed_dictionaries({"a": TEXT, "b, c": TEXT}), min_size=1, max_size=8)


def written(suffix: str, rows: list[dict[str, Any]]) -> bytes:
    """A file of the kind, by pyarrow and the csv and json modules."""
    if suffix == ".parquet":
        out = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows), out)
        return out.getvalue()
    if suffix == ".csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), quoting=csv.QUOTE_ALL)
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue().encode()
    if suffix == ".json":
        return json.dumps(rows, indent=1).encode()
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@given(rows=ROWS, suffix=st.sampled_from(SUFFIXES), packed=st.booleans())
@settings(max_examples=60)
def test_rows_of_every_kind_are_the_same(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], suffix: str, packed: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / f"a{suffix}{'.gz' * packed}"
    content = written(suffix, rows)
    path.write_bytes(gzip.compress(content) if packed else content)
    assert [row for _, row in read_rows(path)] == rows


@pytest.mark.parametrize(
    "content",
    ['[{"a": 1}, {"a": 2}]', '{"version": 1, "data": [{"a": 1}, {"a": 2}]}', '\ufeff{"a": 1}\n{"a": 2}\n'],
)
def test_a_json_file_is_a_list_or_has_one_or_holds_lines(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert [row for _, row in read_rows(tmp_path / "a.json")] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b'{"a": [1], "b": [2]}', r"2 lists \(a, b\)"),
        ("a.json", b'{"a": 1}', "0 lists"),
        ("a.json", b"3", "expected a list of rows, got int"),
        ("a.json", b"[{]", "not JSON"),
        ("a.json", b"[1, {}]", "row 1: expected an object, got int"),
        ("a.json", b" ", "has no rows"),
        ("a.csv", b"a,b\n1,2\n3\n4,5,6\n", "line 3: 1 values for 2 columns; .*line 4: 3 values for 2 columns"),
        ("a.csv", b'a,b\n"1\n2",3\n4\n', "line 4: 1 values"),
        ("a.csv", b"a,a\n1,2\n", "named twice"),
        ("a.csv", b'a,b\n1,"2\n', "not CSV behind line 1"),
        ("a.csv", b"a,b\n\xff,2\n", "not UTF-8"),
        ("a.jsonl.gz", b"plain", "not a whole gzip file"),
        ("a.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 9999)[:40], "not a whole gzip file"),
        ("a.parquet.gz", gzip.compress(b"PAR1"), "not a whole Parquet file"),
        ("a.txt", b"x", r"expected a name ending in \.jsonl, .*\.parquet"),
        ("a.txt.gz", b"x", "expected a name ending in"),
        (
            "a.jsonl",
            b'\n{"a": 1}\n{"a"\n[2]\n',
            r"2 bad rows: .*line 3: not JSON .*line 4: expected an object, got list",
        ),
    ],
)
def test_what_cannot_be_read_is_told_by_its_place(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words) as error:
        read_rows(tmp_path / name)
    assert name in str(error.value)


def test_a_field_may_be_long(tmp_path: Path) -> None:
    """The csv module's own limit is 128 KiB, and stays what it was."""
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text('a\n"' + "x" * 10**6 + '"\n')
    assert len(read_rows(tmp_path / "a.csv")[0][1]["a"]) == 10**6
    assert csv.field_size_limit() == limit


def test_the_first_bad_rows_are_told_and_the_rest_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n" + "[]\n" * 33)
    with pytest.raises(ValueError, match="has 33 bad rows: ") as error:
        read_rows(tmp_path / "a.jsonl")
    assert str(error.value).count("expected an object") == MOST_ERRORS
    assert str(error.value).endswith("line 21: expected an object, got list; and 13 more")
    assert error_text("a", ["one"]) == "one"


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a": 1}\n' + b"\xff" * 10)
    assert next(stream_records(tmp_path / "a.jsonl")).row == {"a": 1}
