"""Files are tokenised once: by as many processes as asked for, with one result, and anew where anything changed."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Never

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.reading import tokenized as tokenised
from apps.sft.reading.examples import BadRow, Columns, Example
from apps.sft.reading.samples import Encoded, encode_messages, encode_text
from apps.sft.reading.selection import usable_of
from apps.sft.reading.store import Entry, Store
from apps.sft.reading.tokenized import Encoder, fingerprint, tokenize_file
from chat_tools import Renderer

TOKENIZER = build_tokenizer()


def chat(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "a.jsonl", [{"messages": chat(f"{i}+1=", str(i + 1)), "text": "x"} for i in range(700)])


def entries(store: Store) -> list[tuple[Any, ...]]:
    return [(store.key(i), *(part.tolist() for part in store.tokens(i))) for i in range(len(store))]


@dataclass(frozen=True)
class Telling(Encoder):
    """Leaves its process in place of tokens."""

    def entry(self, example: Example | BadRow) -> Entry:
        assert not isinstance(example, BadRow)
        return Entry(example.row, example.key, Encoded([os.getpid()], [True]))


def test_processes_share_a_file_and_change_nothing(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = tokenize_file(file, Columns(), TOKENIZER, None, tmp_path / "one")
    shared = tokenize_file(file, Columns(), TOKENIZER, None, tmp_path / "two", processes=2)
    assert entries(alone) == entries(shared)
    assert shared.rows.tolist() == list(range(1, 701))
    monkeypatch.setattr(tokenised, "Encoder", Telling)
    store = tokenize_file(file, Columns(), TOKENIZER, None, tmp_path / "three", processes=2)
    workers = {store.tokens(i)[0][0] for i in range(700)}
    assert os.getpid() not in workers
    assert 1 <= len(workers) <= 2


def test_a_bad_row_is_told_by_processes_too_and_can_be_left_out(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file.open("a") as more:
        more.write(json.dumps({"messages": [*chat("a", "b"), {"role": "system", "content": "late"}]}) + "\n")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 701: the chat template refuses the conversation"):
        tokenize_file(file, Columns(), TOKENIZER, None, tmp_path / "tokens", processes=2)
    monkeypatch.setattr(tokenised, "write_batches", None)  # what was tokenised is there
    store = tokenize_file(file, Columns(), TOKENIZER, None, tmp_path / "tokens", bad_rows="skip")
    assert list(store.problems) == [700]
    assert len(usable_of(store, 4096, "skip").entries) == 700


def test_a_file_is_tokenised_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokenize_file(file, Columns(), TOKENIZER, None, tmp_path / "tokens")

    def never(*args: Any) -> Never:
        raise AssertionError(args)

    monkeypatch.setattr(tokenised, "write_batches", never)
    moved = file.rename(tmp_path / "a.moved.jsonl").rename(tmp_path / "a.jsonl")
    assert tokenize_file(moved, Columns(), TOKENIZER, None, tmp_path / "tokens").path == first.path


def other(**changes: Any) -> PreTrainedTokenizerBase:
    tokenizer = build_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer": other(chat_template=TOKENIZER.chat_template + " ")},
        {"tokenizer": other(eos_token="<|endoftext|>" if TOKENIZER.eos_token != "<|endoftext|>" else "<|im_end|>")},
        {"stop_tokens": ("<|im_end|>",)},
        {"columns": Columns(form="text")},
        {"columns": Columns(messages="talk")},
    ],
)
def test_what_changes_tokens_changes_the_name(file: Path, change: dict[str, Any]) -> None:
    usual = {"path": file, "columns": Columns(), "tokenizer": TOKENIZER, "stop_tokens": None}
    assert fingerprint(**usual) == fingerprint(**usual)
    assert fingerprint(**(usual | change)) != fingerprint(**usual)


def test_the_content_of_a_file_and_the_code_change_the_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(file, Columns(), TOKENIZER, None)
    text = file.read_text()
    file.write_text(text.replace("699+1=", "699+2="))
    assert fingerprint(file, Columns(), TOKENIZER, None) != before
    file.write_text(text)
    assert fingerprint(file, Columns(), TOKENIZER, None) == before
    monkeypatch.setattr(tokenised, "_digest_of_code", lambda: "newer")
    assert fingerprint(file, Columns(), TOKENIZER, None) != before


def trained(encoded: Encoded) -> str:
    return str(TOKENIZER.decode([i for i, m in zip(encoded.ids, encoded.mask, strict=True) if m]))


def test_a_completion_is_trained_and_its_prompt_is_not() -> None:
    encoded = encode_text(TOKENIZER, "37+58=", "95")
    assert TOKENIZER.decode(encoded.ids) == "37+58=95" + TOKENIZER.eos_token
    assert trained(encoded) == "95" + TOKENIZER.eos_token


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "hello there"),
        ("hel", "lo there"),
        ("a ", " b"),
        ("<|im_", "end|>"),
        ("37+58=95<|im_end|>", "next"),
        ("37+58=95<|im_end|>", "<|im_start|>next"),
        ("<|im_end|>", "next"),
    ],
)
def test_the_prompt_has_the_tokens_that_it_has_alone(prompt: str, text: str) -> None:
    """Also where a token of the two together would reach over the border."""
    encoded = encode_text(TOKENIZER, prompt, text)
    alone = TOKENIZER(prompt)["input_ids"]
    assert list(encoded.ids[: len(alone)]) == alone
    assert encoded.mask == [i >= max(1, len(alone)) for i in range(len(encoded.ids))]
    assert TOKENIZER.decode(encoded.ids) == prompt + text + TOKENIZER.eos_token


def around(before: str, after: str) -> PreTrainedTokenizerBase:
    """A tokenizer that puts special tokens around every text."""
    tokenizer = build_tokenizer()
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (before, after) if token]
    single = f"{before} $A {after}".split()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=ids)
    return tokenizer


END = str(TOKENIZER.eos_token)
SPECIAL = [("", ""), ("", END), ("<|im_start|>", END), (END, ""), (END, END)]


@pytest.mark.parametrize(("before", "after"), SPECIAL)
def test_an_end_of_sequence_is_not_written_twice(before: str, after: str) -> None:
    tokenizer = around(before, after)
    encoded = [encode_text(tokenizer, "1+1=", text) for text in ("2" + END, "2")]
    assert list(encoded[0].ids) == list(encoded[1].ids)
    assert tokenizer.decode(encoded[0].ids) == before + "1+1=2" + END
    assert trained(encoded[0]) == "2" + END


@pytest.mark.parametrize(("before", "after"), SPECIAL)
def test_the_end_of_a_prompt_is_the_prompts(before: str, after: str) -> None:
    encoded = encode_text(around(before, after), "1+1=2" + END, "next")
    assert TOKENIZER.decode(encoded.ids) == before + "1+1=2" + END + "next" + END
    assert trained(encoded) == "next" + END


def test_of_a_conversation_the_completion_alone_is_trained(tmp_path: Path) -> None:
    row = {"prompt": [*chat("1+1=", "2"), chat("2+2=", "")[0]], "completion": [chat("", "4")[1]]}
    store = tokenize_file(write(tmp_path / "a.jsonl", [row]), Columns(), TOKENIZER, None, tmp_path / "tokens")
    ids, mask = store.tokens(0)
    assert TOKENIZER.decode(ids[mask]) == "4<|im_end|>"
    whole = encode_messages(Renderer(TOKENIZER), [*chat("1+1=", "2"), *chat("2+2=", "4")])
    assert ids.tolist() == list(whole.ids)
    assert trained(whole) == "2<|im_end|>4<|im_end|>"


def test_forms_are_told_apart_by_the_first_row(tmp_path: Path) -> None:
    rows = [{"messages": chat("a", "b"), "text": "c"}]
    plain = Path(write(tmp_path / "a.jsonl", rows))
    found = {
        form: TOKENIZER.decode(tokenize_file(plain, Columns(form=form), TOKENIZER, None, tmp_path).tokens(0)[0])
        for form in ("auto", "messages", "text")
    }
    assert found["auto"] == found["messages"]
    assert found["text"] == "c" + TOKENIZER.eos_token


def test_plain_text_needs_no_chat_template(tmp_path: Path) -> None:
    bare = other(chat_template=None)
    path = write(tmp_path / "a.jsonl", [{"text": "abc"}])
    assert len(tokenize_file(path, Columns(), bare, None, tmp_path)) == 1
    talk = write(tmp_path / "b.jsonl", [{"messages": chat("a", "b")}])
    with pytest.raises(ValueError, match="no chat template"):
        tokenize_file(talk, Columns(), bare, None, tmp_path)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        tokenize_file(path, replace(Columns(), form="text"), other(eos_token=None), None, tmp_path)
