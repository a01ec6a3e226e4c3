"""Rows as data sets have them: each format gives the tokens of the same conversation written as OpenAI's messages."""

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import DataConfig
from apps.sft.data import Conversations, load_conversations
from apps.sft.reading.examples import Columns
from apps.sft.reading.sources import parse_sources
from apps.sft.reading.tokenized import tokenize_file
from rollout import calculator

TOKENIZER = build_tokenizer()
TOOLS = [calculator().schema]
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1+2"}}}
SYSTEM, ASK, SAY = ({"role": r, "content": c} for r, c in (("system", "brief"), ("user", "1+2?"), ("assistant", "3")))
CALLS = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}, SAY]
SAID = [{"from": "human", "value": "1+2?"}, {"from": "gpt", "value": "3"}]
FORMATS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("ShareGPT rows, of which conversations is read", {"conversations": SAID}, {"messages": [ASK, SAY]}),
    (
        "ShareGPT rows, of which conversations, system is read, and not id",
        {"conversations": SAID, "system": "brief", "id": 3},
        {"messages": [SYSTEM, ASK, SAY]},
    ),
    ("ShareGPT rows", {"conversations": [ASK, SAY], "system": ""}, {"messages": [ASK, SAY]}),
    ("OpenAI messages rows, of which messages is read, and not system", {"messages": SAID, "system": "x"},
     {"messages": [ASK, SAY]}),
    (
        "ShareGPT rows, of which conversations, tools is read",
        {
            "conversations": [
                SAID[0],
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "3"},
                SAID[1],
            ],
            "tools": json.dumps(TOOLS),
        },
        {"messages": CALLS, "tools": TOOLS},
    ),
    (
        "Alpaca rows, of which instruction, input, output is read",
        {"instruction": "add", "input": "1+2?", "output": "3"},
        {"messages": [{"role": "user", "content": "add\n\n1+2?"}, SAY]},
    ),
    (
        "Alpaca rows",
        {"instruction": "1+2?", "input": "", "output": "3", "system": "brief", "history": [["a", "b"]]},
        {"messages": [SYSTEM, {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, ASK, SAY]},
    ),
]  # fmt: skip


def tokens(path: Path, row: dict[str, Any], said: list[str] | None = None) -> list[list[Any]]:
    path.write_text(json.dumps([row]))
    log_line = (said if said is not None else []).append
    store = tokenize_file(path, Columns(), TOKENIZER, None, path.parent / "tokens", log_line=log_line)
    return [values.tolist() for values in store.tokens(0)]


@pytest.mark.parametrize(("line", "row", "plain"), FORMATS)
def test_a_format_is_detected_told_and_read(
    tmp_path: Path, line: str, row: dict[str, Any], plain: dict[str, Any]
) -> None:
    said: list[str] = []
    assert tokens(tmp_path / "a.json", row, said) == tokens(tmp_path / "b.json", plain)
    assert said[0].startswith(f"a.json: {line}")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "alien", "value": "x"}]}, "a turn needs a 'from' of human, .*got 'alien'"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "'function_call': 'x' is not JSON"),
        ({"conversations": SAID, "system": 3}, "column 'system': expected a text"),
        ({"conversations": [SYSTEM, ASK, SAY], "system": "x"}, "'system' has a system prompt and so have the messages"),
        ({"instruction": "a", "output": ""}, "column 'output': expected a text that is not empty"),
        ({"instruction": "a", "output": "b", "input": 3}, "column 'input': expected a text"),
        ({"instruction": "a", "output": "b", "history": [["a"]]}, "column 'history': expected pairs"),
        ({"chosen": "a"}, "nor 'instruction' and 'output'.* it has chosen"),
    ],
)
def test_what_is_no_such_row_is_refused(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tokens(tmp_path / "a.json", row)


ROWS = [{"instruction": f"say {i}", "input": "", "output": f"{i}"} for i in range(40)]


def as_csv(rows: list[dict[str, Any]]) -> bytes:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().encode()


def as_parquet(rows: list[dict[str, Any]]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out)
    return out.getvalue()


FILES = {
    "a.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "a.json": json.dumps({"rows": ROWS}).encode(),
    "a.csv": as_csv(ROWS),
    "a.parquet": as_parquet(ROWS),
}


def loaded(cache: Path, *data: str, said: list[str] | None = None, **settings: Any) -> Conversations:
    config = DataConfig(data=data, **settings)
    log_line = (said if said is not None else []).append
    return load_conversations(config, parse_sources(data), TOKENIZER, None, cache, log_line=log_line)


def texts(found: Conversations) -> list[list[str]]:
    return [[str(TOKENIZER.decode(s["input_ids"])) for s in side] for side in (found.train, found.held_out)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_samples(tmp_path: Path, name: str, packed: bool) -> None:
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    path = tmp_path / "other" / (name + ".gz" * packed)
    path.parent.mkdir()
    path.write_bytes(gzip.compress(FILES[name]) if packed else FILES[name])
    assert texts(loaded(tmp_path / "t", str(path))) == texts(loaded(tmp_path / "t", str(tmp_path / "a.jsonl")))


def test_a_directory_is_one_source_with_one_weight(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    for i in range(4):
        part = "".join(json.dumps(row) + "\n" for row in ROWS[10 * i : 10 * i + 10])
        (tmp_path / "many" / f"{i}.jsonl").write_text(part)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": f"t{i}"}) + "\n" for i in range(20)))
    found = loaded(tmp_path / "t", f"{tmp_path}/many:3", f"{tmp_path}/b.jsonl:1", eval_share=0.1)
    assert len(found.sizes) == 2
    assert found.sizes[0] + found.sizes[1] + len(found.held_out) == 60
    assert found.weights == (3, 1)
    assert [name for name, _ in found.files] == ["many", "b.jsonl"]
    whole = loaded(tmp_path / "t", f"{tmp_path}/many")
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    assert texts(whole) == texts(loaded(tmp_path / "t", f"{tmp_path}/a.jsonl"))
    with pytest.raises(ValueError, match=r"0\.jsonl is read twice"):
        loaded(tmp_path / "t", f"{tmp_path}/many", f"{tmp_path}/many/0.jsonl")


def test_a_data_set_of_the_hub_is_read_from_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / "datasets--some--talks"
    (folder / "snapshots" / "abc" / "data").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots/abc/data/train-00000-of-00001.parquet").write_bytes(FILES["a.parquet"])
    (folder / "snapshots/abc/data/test-00000-of-00001.parquet").write_bytes(as_parquet(ROWS[:3]))
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    assert texts(loaded(tmp_path / "t", "some/talks")) == texts(loaded(tmp_path / "t", f"{tmp_path}/a.jsonl"))
    split = loaded(tmp_path / "t", "some/talks:train", eval_data=Path("some/talks:test"))
    assert (len(split.train), len(split.held_out)) == (37, 3)


def test_bad_rows_are_told_at_once_or_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = ["{", "[1]", '{"instruction": "a"}', '{"instruction": "a", "output": "b", "input": 1}'] * 6
    path.write_bytes(FILES["a.jsonl"] + "\n".join([*bad, ""]).encode())
    with pytest.raises(ValueError, match=r"a\.jsonl has 24 bad rows \(--bad-rows skip leaves them out\)") as error:
        loaded(tmp_path / "t", str(path))
    words = str(error.value)
    assert [f"line {number}: " in words for number in range(40, 66)] == [False, *[True] * 20, *[False] * 5]
    assert words.endswith("; and 4 more")
    found = loaded(tmp_path / "t", str(path), bad_rows="skip")
    assert len(found.train) + len(found.held_out) == 40
    (line,) = found.skipped.lines()
    assert line.startswith("left out 24 rows: can't be used (--bad-rows skip) (first: a.jsonl, line 41: not JSON (")
