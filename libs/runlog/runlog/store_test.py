"""The files: every line whole, a cut line forgiven, a resumed run with each step once."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runlog.store import cut_after, encode, plain, read_lines

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=20)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(st.dictionaries(st.text(max_size=6), values, max_size=4))
def test_a_row_is_one_line_of_strict_json(row: dict[str, Any]) -> None:
    line = encode(row)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    read = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read == json.loads(json.dumps(plain(row)))


def test_numbers_of_other_libraries_and_odd_values() -> None:
    class Tensor:
        def tolist(self) -> list[float]:
            return [1.5, math.nan]

    assert plain({"t": Tensor(), "n": math.inf, 3: (1, {"a"})}) == {"t": [1.5, None], "n": None, "3": [1, ["a"]]}
    with pytest.raises(TypeError, match="cannot log a object"):
        plain(object())


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n{"st')
    assert [r["step"] for r in read_lines(path)] == [1, 2]
    assert list(read_lines(tmp_path / "absent.jsonl")) == []


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":1}\nnot json\n')
    with pytest.raises(ValueError, match="line 2: not valid JSON"):
        list(read_lines(path))
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="expected an object"):
        list(read_lines(path))


def test_cut_after_keeps_the_steps_up_to_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n{"step":3}\n{"st')
    assert cut_after(path, 2) == 2
    assert path.read_text() == '{"step":1}\n{"step":2}\n'
    assert cut_after(tmp_path / "absent.jsonl", 2) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["m.jsonl"]


@pytest.mark.parametrize("text", ["\u2028", "\x85", "\r", "\x0b", "\x1c"])
def test_odd_line_ends_inside_text_stay_inside(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text(encode({"step": 1, "text": f"a{text}b"}) + encode({"step": 2}), encoding="utf-8", newline="\n")
    assert [r.get("text") for r in read_lines(path)] == [f"a{text}b", None]
