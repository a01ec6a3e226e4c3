import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from chat_tools import dataset
from chat_tools.dataset import (
    PROBLEM,
    DatasetOptions,
    DatasetReport,
    progress_bar,
    read_rows,
    tokenize_dataset,
    usable_workers,
    write_parquet,
)
from chat_tools.rendering.render import render
from chat_tools.testing.tokenizer import tiny_tokenizer

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
ROWS = [
    {"messages": TALK},
    {"messages": TALK[:1]},
    {"messages": []},
    {"other": 1},
    [1],
    {"messages": [{"content": "x"}]},
    {"messages": json.dumps(TALK)},
    {"messages": [TALK[0], {"role": "assistant", "content": "see you " * 50}]},
    {"messages": [{"role": "user", "content": 3}, TALK[1]]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer("chatml", marks=False)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


def test_rows_and_reasons(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path / "talks.jsonl", ROWS)
    report, seen = DatasetReport(), []
    examples = list(
        tokenize_dataset(
            [path],
            tokenizer,
            DatasetOptions(max_length=60),
            workers=1,
            report=report,
            progress=lambda done, total: seen.append((done, total)),
        )
    )
    assert [e.row for e in examples] == [0, 6]
    expected = render(tokenizer, TALK)
    assert all((e.ids, e.loss_mask) == (expected.ids, expected.assistant_mask) for e in examples)
    assert (report.rows, report.kept, report.tokens) == (10, 2, 2 * len(expected.ids))
    assert report.trained_tokens == 2 * sum(expected.assistant_mask)
    reasons = dict(report.skipped)
    assert reasons.pop("nothing to train: no assistant message") == 1
    assert reasons.pop("no list of messages in 'messages'") == 2
    assert reasons.pop("not an object") == 1
    assert reasons.pop("a message without a role") == 1
    assert reasons.pop("longer than 60 tokens") == 1
    assert reasons.pop("not valid JSON") == 1
    assert list(reasons.values()) == [1]
    assert "cannot be rendered: TypeError" in next(iter(reasons))
    assert report.examples["not valid JSON"] == "talks.jsonl:10"
    assert seen[-1] == (10, None)
    assert "2 of 10 rows" in str(report)


def test_two_processes_give_the_same_in_the_same_order(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "_free_memory", lambda: 2 * dataset.BYTES_A_WORKER)
    rows = [{"messages": [TALK[0], {"role": "assistant", "content": f"number {i}"}]} for i in range(300)]
    path = write(tmp_path / "many.jsonl", rows)
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")
    reports = [DatasetReport(), DatasetReport()]
    one, two = (
        list(tokenize_dataset([path], tokenizer, workers=n + 1, report=report)) for n, report in enumerate(reports)
    )
    assert one == two
    assert len(one) == 300
    assert reports[0].skipped == reports[1].skipped
    assert reports[1].workers == 2


def test_parquet_in_and_out(tmp_path: Path, tokenizer: Any) -> None:
    source = tmp_path / "talks.parquet"
    calls: dict[str, Any] = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}],
    }
    rows: list[dict[str, Any]] = [{"messages": TALK}, {"messages": [TALK[0], calls]}]
    parquet.write_table(pa.Table.from_pylist(rows), source)
    examples = list(tokenize_dataset([source], tokenizer, workers=1))
    assert [e.ids for e in examples] == [render(tokenizer, row["messages"]).ids for row in rows]
    assert write_parquet(examples, tmp_path / "tokens.parquet") == 2
    written = parquet.read_table(tmp_path / "tokens.parquet").to_pylist()
    assert [row["input_ids"] for row in written] == [e.ids for e in examples]
    assert [row["loss_mask"] for row in written] == [e.loss_mask for e in examples]


def test_an_unknown_kind_of_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        list(read_rows([tmp_path / "talks.csv"]))


def test_the_number_of_workers_is_what_the_machine_can_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    processors = len(os.sched_getaffinity(0))
    assert usable_workers(256) <= processors
    assert usable_workers() <= processors
    assert usable_workers(rows=10) == 1
    assert usable_workers(1) == 1
    monkeypatch.setattr(dataset, "_free_memory", lambda: dataset.BYTES_A_WORKER - 1)
    assert usable_workers() == 1
    with pytest.raises(ValueError, match="None chooses"):
        usable_workers(0)


def test_without_a_terminal_progress_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show = progress_bar("rows")
    show(1, 2)
    show(2, 2)
    assert capsys.readouterr().err == "rows: 2 of 2 rows\n"


def test_on_a_terminal_progress_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    show = progress_bar("rows")
    show(1, 4)
    show(4, 4)
    assert "100%" in capsys.readouterr().err


def test_a_straddling_token_drops_no_row(tmp_path: Path) -> None:
    """A history of empty thoughts, whose newlines are one token across the end of the prompt."""
    tokenizer = tiny_tokenizer("thinking", marks=False)
    path = tmp_path / "talks.jsonl"
    rows = [{"messages": [TALK[0], {**TALK[1], "content": f"{i}"}]} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = DatasetReport()
    examples = list(tokenize_dataset([path], tokenizer, workers=1, report=report))
    assert render(tokenizer, TALK).straddling
    assert (len(examples), report.kept, report.skipped) == (20, 20, {})


def test_a_row_with_a_problem_is_dropped_and_counted_unless_told_otherwise(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer("harmony", marks=False)
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": [call, call]}, *TALK]
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    report = DatasetReport()
    assert list(tokenize_dataset([path], tokenizer, workers=1, report=report)) == []
    assert dict(report.skipped) == {f"{PROBLEM}: the template leaves out some of its tool calls": 1}
    (example,) = tokenize_dataset([path], tokenizer, DatasetOptions(strict=False), workers=1)
    trained = [i for i, on in zip(example.ids, example.loss_mask, strict=True) if on]
    assert tokenizer.decode(trained) == "<|channel|>final<|message|>hello<|return|>"


def test_stop_tokens_reach_the_mask(tmp_path: Path) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"messages": TALK}) + "\n")
    with pytest.raises(ValueError, match="another model's"):
        render(tiny_tokenizer("glm"), TALK, stop_tokens=[10**6])
    report = DatasetReport()
    assert not list(
        tokenize_dataset([path], tiny_tokenizer("glm"), DatasetOptions(stop_tokens=(10**6,)), workers=1, report=report)
    )
    assert "another model's" in next(iter(report.skipped))
