import json

import pytest

from apps.quickstart.arithmetic import addition
from apps.quickstart.demonstrations import demonstration
from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.config import DataConfig
from apps.sft.data import load_conversations, write_demonstrations
from apps.sft.samples import sample_of

TOKENIZER = build_tokenizer()
CALL = {"type": "function", "function": {"name": "calculator", "arguments": '{"expression": "1+2"}'}}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def trained_text(sample):
    return TOKENIZER.decode(sample["input_ids"][sample["loss_mask"]])


def test_the_assistants_tokens_alone_are_trained():
    sample = sample_of(TOKENIZER, demonstration(addition(37, 58), "arithmetic"))
    assert trained_text(sample) == "\\boxed{95}<|im_end|>"


def test_both_turns_of_a_tool_conversation_are_trained_and_the_result_is_not():
    sample = sample_of(TOKENIZER, demonstration(addition(37, 58), "calculator"))
    text = trained_text(sample)
    assert text.startswith("<tool_call>")
    assert text.endswith("\\boxed{95}<|im_end|>")
    assert "tool_response" not in text


def test_rows_are_split_and_what_is_left_out_is_counted(tmp_path):
    rows = [{"messages": chat(f"question {i}", "yes")} for i in range(100)]
    rows += [{"messages": chat("long", "x" * 500)}, {"messages": [{"role": "user", "content": "and?"}]}]
    path = write(tmp_path / "a.jsonl", rows)
    found = load_conversations(DataConfig(eval_share=0.2, max_tokens=100), path, TOKENIZER)
    assert len(found.train) + len(found.held_out) == 100
    assert 5 < len(found.held_out) < 40
    assert sum(found.skipped.values()) == 2


def test_the_split_does_not_depend_on_the_order_of_the_rows(tmp_path):
    rows = [{"messages": chat(f"question {i}", "yes")} for i in range(60)]
    config = DataConfig(eval_share=0.3)
    first = load_conversations(config, write(tmp_path / "a.jsonl", rows), TOKENIZER)
    second = load_conversations(config, write(tmp_path / "b.jsonl", rows[::-1]), TOKENIZER)
    texts = [{TOKENIZER.decode(s["input_ids"]) for s in found.held_out} for found in (first, second)]
    assert texts[0] == texts[1]


def test_arguments_may_be_json_text(tmp_path):
    message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    rows = [{"messages": [{"role": "user", "content": str(i)}, message]} for i in range(40)]
    found = load_conversations(DataConfig(eval_share=0.3), write(tmp_path / "a.jsonl", rows), TOKENIZER)
    assert "<parameter=expression>\n1+2\n</parameter>" in trained_text(found.train[0])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"conversation": []}, "no column 'messages'.*--messages-column"),
        ({"messages": "hello"}, "expected a list of messages"),
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
            "are not JSON",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}, row])
    with pytest.raises(ValueError, match=f"row 2.*{message}"):
        load_conversations(DataConfig(), path, TOKENIZER)


def test_demonstrations_are_a_file_like_any_other(tmp_path):
    config = DataConfig(task="calculator", demonstrations=64)
    path = write_demonstrations(config, 0, tmp_path / "demonstrations.jsonl")
    found = load_conversations(config, path, TOKENIZER)
    assert len(found.train) + len(found.held_out) == 64
    assert not found.skipped
