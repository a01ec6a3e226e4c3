import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from apps.quickstart.arithmetic import addition
from apps.quickstart.demonstrations import demonstration
from apps.quickstart.tokenizer import build_tokenizer
from apps.sft import data as sft_data
from apps.sft.config import DataConfig
from apps.sft.data import write_demonstrations
from apps.sft.reading.conversations import Conversation
from apps.sft.reading.examples import Columns, read_examples
from apps.sft.reading.samples import Sample, sample_of, stop_tokens_of
from apps.sft.reading.sources import Source
from chat_tools import Renderer

TOKENIZER = build_tokenizer()
ARGUMENTS = {"expression": "1+2"}
CALL = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+2"}'}}


def load_conversations(
    config: DataConfig, path: Path, tokenizer: PreTrainedTokenizerBase, stop_tokens: tuple[str, ...] | None = None
) -> sft_data.Conversations:
    """One file, its tokens kept beside it."""
    return sft_data.load_conversations(config, [Source(path)], tokenizer, stop_tokens, path.parent / "tokens")


def write(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def trained_text(sample: Sample) -> str:
    return str(TOKENIZER.decode(sample["input_ids"][sample["loss_mask"]]))


def test_the_assistants_tokens_alone_are_trained() -> None:
    sample = sample_of(Renderer(TOKENIZER), demonstration(addition(37, 58), "arithmetic"))
    assert trained_text(sample) == "\\boxed{95}<|im_end|>"


def test_both_turns_of_a_tool_conversation_are_trained_and_the_result_is_not() -> None:
    sample = sample_of(Renderer(TOKENIZER), demonstration(addition(37, 58), "calculator"))
    text = trained_text(sample)
    assert text.startswith("<tool_call>")
    assert text.endswith("\\boxed{95}<|im_end|>")
    assert "tool_response" not in text


def test_a_turn_ends_with_the_token_that_stops_the_model(tmp_path: Path) -> None:
    """The template writes two closing tokens; generation_config.json says that the second one stops the model."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|></tool_response>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = write(tmp_path / "a.jsonl", [{"messages": chat(str(i), "yes")} for i in range(9)])
    assert stop_tokens_of(tmp_path, tokenizer) is None
    stop = tokenizer.convert_tokens_to_ids("</tool_response>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop]}))
    stops = stop_tokens_of(tmp_path, tokenizer)
    for stop_tokens, ends in ((None, "yes<|im_end|>"), (stops, "yes<|im_end|></tool_response>")):
        conversations = load_conversations(DataConfig(), rows, tokenizer, stop_tokens)
        assert {trained_text(sample) for sample in (*conversations.train, *conversations.held_out)} == {ends}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 100000}')
    with pytest.raises(ValueError, match=r"generation_config\.json, eos_token_id"):
        stop_tokens_of(tmp_path, tokenizer)


def test_rows_are_split_and_what_is_left_out_is_counted(tmp_path: Path) -> None:
    rows = [{"messages": chat(f"question {i}", "yes")} for i in range(100)]
    rows += [{"messages": chat("long", "x" * 500)}, {"messages": [{"role": "user", "content": "and?"}]}]
    path = write(tmp_path / "a.jsonl", rows)
    conversations = load_conversations(DataConfig(eval_share=0.2, max_tokens=100), path, TOKENIZER)
    assert len(conversations.train) + len(conversations.held_out) == 100
    assert 5 < len(conversations.held_out) < 40
    assert sum(conversations.skipped.counts.values()) == 2


def test_the_split_does_not_depend_on_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = [{"messages": chat(f"question {i}", "yes")} for i in range(60)]
    config = DataConfig(eval_share=0.3)
    first = load_conversations(config, write(tmp_path / "a.jsonl", rows), TOKENIZER)
    second = load_conversations(config, write(tmp_path / "b.jsonl", rows[::-1]), TOKENIZER)
    texts = [{TOKENIZER.decode(s["input_ids"]) for s in found.held_out} for found in (first, second)]
    assert texts[0] == texts[1]


def test_arguments_may_be_json_text(tmp_path: Path) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    rows = [{"messages": [{"role": "user", "content": str(i)}, message]} for i in range(40)]
    conversations = load_conversations(DataConfig(eval_share=0.3), write(tmp_path / "a.jsonl", rows), TOKENIZER)
    assert "<parameter=expression>\n1+2\n</parameter>" in trained_text(conversations.train[0])


def yes_or_no(number: int, answer: str) -> dict[str, Any]:
    system = {"role": "system", "content": "Answer yes or no."}
    return {"messages": [system, *chat(f"Is {number} odd?", answer)]}


YES_NO = [yes_or_no(n, "yes" if n % 2 else "no") for n in range(400)]


def texts(samples: Iterable[Sample]) -> list[str]:
    return [TOKENIZER.decode(sample["input_ids"]) for sample in samples]


def test_rows_that_begin_and_end_alike_are_not_one(tmp_path: Path) -> None:
    """400 rows, one system prompt, two answers: 20 are held out, of both answers, and none is lost."""
    conversations = load_conversations(DataConfig(), write(tmp_path / "a.jsonl", YES_NO), TOKENIZER)
    assert (len(conversations.train), len(conversations.held_out), conversations.skipped.counts) == (380, 20, {})
    for side in (conversations.train, conversations.held_out):
        assert {trained_text(sample) for sample in side} == {"yes<|im_end|>", "no<|im_end|>"}


def test_a_held_out_file_removes_the_identical_rows_alone_and_says_so(tmp_path: Path) -> None:
    held_out = write(tmp_path / "eval.jsonl", [*YES_NO[:3], yes_or_no(1000, "no")])
    config = DataConfig(data=(str(tmp_path / "a.jsonl"),), eval_data=held_out)
    conversations = load_conversations(config, write(tmp_path / "a.jsonl", YES_NO), TOKENIZER)
    assert (len(conversations.train), len(conversations.held_out)) == (397, 4)
    assert list(conversations.skipped.counts.values()) == [3]
    assert "left out 3 rows: also in" in conversations.skipped.lines()[0]
    assert "a.jsonl, line 1" in conversations.skipped.lines()[0]


LONG = {"messages": chat("long", "x" * 300)}
UNASKED = {"messages": [{"role": "user", "content": "and?"}]}
ROWS = st.sampled_from([*YES_NO[:12], LONG, UNASKED])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROWS, min_size=1, max_size=30), st.one_of(st.none(), st.lists(ROWS, min_size=1, max_size=10)))
def test_counts_add_up_and_no_conversation_is_on_both_sides(
    tmp_path: Path, rows: list[dict[str, Any]], held_out: list[dict[str, Any]] | None
) -> None:
    config = DataConfig(max_tokens=100, eval_share=0.3)
    if held_out is not None:
        config = DataConfig(
            max_tokens=100, data=(str(tmp_path / "a.jsonl"),), eval_data=write(tmp_path / "eval.jsonl", held_out)
        )
    usable = {json.dumps(row) for row in rows if row not in (LONG, UNASKED)}
    path = write(tmp_path / "a.jsonl", rows)
    held_out_rows = {json.dumps(row) for row in held_out or [] if row not in (LONG, UNASKED)}
    enough = len(usable) >= 2 if held_out is None else held_out_rows and usable - held_out_rows
    if not enough:
        with pytest.raises(ValueError, match="too few"):
            load_conversations(config, path, TOKENIZER)
        return
    conversations = load_conversations(config, path, TOKENIZER)
    assert len(conversations.train) + len(conversations.held_out) + sum(conversations.skipped.counts.values()) == len(
        rows
    ) + len(held_out or [])
    assert not set(texts(conversations.train)) & set(texts(conversations.held_out))


@given(st.permutations(["role", "content", "name"]))
def test_a_key_is_of_the_content_and_the_same_in_every_run(order: list[str]) -> None:
    message = {"role": "user", "content": "\u00e9\ud800", "name": "x"}
    conversation = Conversation(1, ({name: message[name] for name in order},))
    assert conversation.key == "007b910a2ebd273d1bad7d9a8871dcb2"
    assert replace(conversation, row=2).key == conversation.key
    assert replace(conversation, tools=({"name": "f"},)).key != conversation.key


@given(st.integers(0, 3), st.sampled_from(["role", "content"]))
def test_every_message_counts(at: int, field: str) -> None:
    messages = [{"role": "user", "content": f"{n}"} for n in range(4)]
    changed = [dict(message) for message in messages]
    changed[at][field] += "x"
    assert Conversation(1, tuple(messages)).key != Conversation(1, tuple(changed)).key


def test_a_row_with_a_problem_is_dropped_and_counted(tmp_path: Path) -> None:
    """The template leaves tool calls out: what the assistant wrote in such a turn is not what is rendered."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = [{"messages": chat(f"question {i}", "yes")} for i in range(20)]
    call = {"role": "assistant", "content": "let me see", "tool_calls": [CALL]}
    rows += [{"messages": [{"role": "user", "content": f"is {i} odd?"}, call]} for i in range(5)]
    conversations = load_conversations(DataConfig(eval_share=0.2), write(tmp_path / "a.jsonl", rows), tokenizer)
    assert len(conversations.train) + len(conversations.held_out) == 20
    (reason,) = conversations.skipped.counts
    assert "can't be proven" in reason
    assert conversations.skipped.counts[reason] == 5
    assert "line 21" in conversations.skipped.lines()[0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversation": []}, "no column 'messages'.*--messages-column"),
        ({"messages": "hello"}, "expected a list of messages"),
        ({"messages": []}, "an empty one"),
        ({"messages": [{"role": "user", "content": 3}]}, "message 1: content must be a text"),
        ({"messages": [{"role": "user"}]}, "message 1: it has neither"),
        (
            {"messages": chat([{"type": "image"}, {"type": "text", "text": "1+1="}], "2")},
            "message 1: a part of kind 'image'",
        ),
        ({"messages": chat(["1+1="], "2")}, "message 1: a part of kind 'str'"),
        ({"messages": chat("a<image>b", "2"), "images": ["x.png"]}, "'images' holds media"),
        ({"messages": chat("a", "b"), "tools": 3}, "expected a list of tools"),
        ({"messages": chat("a", "b"), "tools": "["}, "'tools'.*is not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": "f(1)"}]}, "tool_calls must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": ["f(1)"]}]}, "must be an object"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": "f"}]}]}, "a function with a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "must be an object",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "a message needs a role"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "late"}]},
            "the chat template refuses",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
                ]
            },
            "is not JSON",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}, row])
    with pytest.raises(ValueError, match=f"a.jsonl, line 2.*{message}"):
        load_conversations(DataConfig(), path, TOKENIZER)


def test_demonstrations_are_a_file_like_any_other(tmp_path: Path) -> None:
    config = DataConfig(task="calculator", demonstrations=64)
    path = write_demonstrations(config, 0, tmp_path / "demonstrations.jsonl")
    conversations = load_conversations(config, path, TOKENIZER)
    assert len(conversations.train) + len(conversations.held_out) == 64
    assert not conversations.skipped.counts


def test_a_parquet_file_reads_like_json_lines(tmp_path: Path) -> None:
    """Arrow gives each message the keys of all, null where a row has none: those are no content."""
    call = {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c1"}]}
    rows = [{"messages": chat(f"question {i}", "yes") if i % 2 else [chat(str(i), "")[0], call]} for i in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    config = DataConfig(eval_share=0.3)
    first = load_conversations(config, write(tmp_path / "a.jsonl", rows), TOKENIZER)
    second = load_conversations(config, tmp_path / "a.parquet", TOKENIZER)
    assert texts(first.train) == texts(second.train)
    assert texts(first.held_out) == texts(second.held_out)


def test_messages_and_calls_may_be_json_text(tmp_path: Path) -> None:
    rows = [{"messages": chat(f"question {i}", "yes"), "tools": []} for i in range(40)]
    packed = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    first = load_conversations(DataConfig(), write(tmp_path / "a.jsonl", rows), TOKENIZER)
    second = load_conversations(DataConfig(), write(tmp_path / "b.jsonl", packed), TOKENIZER)
    assert texts(first.held_out) == texts(second.held_out)


def test_the_ids_of_calls_are_kept(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": "call_7"}]}]}]
    (conversation,) = read_examples(write(tmp_path / "a.jsonl", rows), Columns())
    assert isinstance(conversation, Conversation)
    (call,) = conversation.messages[0]["tool_calls"]
    assert call == {"id": "call_7", "type": "function", "function": {"name": "calculator", "arguments": ARGUMENTS}}
