import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apps.common.data.prompts import read_prompts


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return path


def test_gsm8k_rows(tmp_path: Path) -> None:
    path = write(
        tmp_path / "train.jsonl", [{"question": "1+1?", "answer": "two\n#### 2"}, {"question": "2+2?", "answer": 4}]
    )
    first, second = read_prompts(path, "question", "answer")
    assert first.messages == ({"role": "user", "content": "1+1?"},)
    assert (first.reference, second.reference, second.row) == ("two\n#### 2", "4", 2)


def test_parquet_with_messages_and_a_nested_answer(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hi"}], "reward_model": {"ground_truth": "7"}}]
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (prompt,) = read_prompts(path, "prompt", "reward_model.ground_truth")
    assert prompt.messages == ({"role": "user", "content": "hi"},)
    assert prompt.reference == "7"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "{", "line 1: not JSON"),
        ("a.jsonl", "[1]", "expected an object"),
        ("a.jsonl", '{"question": "x", "anser": "1"}', "no column 'answer'.*'anser'"),
        (
            "a.jsonl",
            '{"question": 3, "answer": "1"}',
            "line 1: column 'question': expected a text or a list of messages",
        ),
        ("a.jsonl", '{"question": "x", "answer": [1]}', "line 1: column 'answer': expected a text or a number"),
        ("a.jsonl", '{"question": [{"role": "usr", "content": "x"}], "answer": "1"}', "a message needs a role"),
        ("a.csv", "ask,answer\n1,2", "no column 'question'"),
        ("a.parquet", "no parquet", "not a whole Parquet file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / name, "question", "answer")


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [{}])
    with pytest.raises(ValueError, match=r"no such data file.*did you mean train\.jsonl"):
        read_prompts(tmp_path / "trian.jsonl", "question", "answer")
