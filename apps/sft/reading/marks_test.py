"""Marks of messages and --train-on: which tokens are trained, held to what each text is."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.quickstart.tokenizer import build_tokenizer
from apps.sft.reading.examples import Columns
from apps.sft.reading.marks import MARKS, split_marks
from apps.sft.reading.selection import Samples, usable_of
from apps.sft.reading.store import Store
from apps.sft.reading.tokenized import tokenize_file
from apps.sft.reading.trained import TrainOn

TOKENIZER = build_tokenizer()
END = "<|im_end|>"
TALK = [
    {"role": "system", "content": "be\nbrief"},
    {"role": "user", "content": "first?"},
    {"role": "assistant", "content": "bad"},
    {"role": "user", "content": "second?\nplease"},
    {"role": "assistant", "content": "good"},
]


def marked(marks: Any) -> dict[str, Any]:
    return {"messages": [{**message, **marks.get(i, {})} for i, message in enumerate(TALK)]}


def stored(tmp_path: Path, row: dict[str, Any], *train_on: TrainOn, bad_rows: Any = "error") -> Store:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row) + "\n")
    columns = replace(Columns(), train_on=train_on or ("assistant",))
    return tokenize_file(path, columns, TOKENIZER, None, tmp_path / "tokens", bad_rows=bad_rows)


def trained(tmp_path: Path, row: dict[str, Any], *train_on: TrainOn) -> str:
    ids, mask = stored(tmp_path, row, *train_on).tokens(0)
    return str(TOKENIZER.decode(ids[mask]))


@pytest.mark.parametrize(("key", "value"), [*product(MARKS, (False, True, 0, 1, 0.0, 1.0))])
def test_every_mark_is_obeyed(tmp_path: Path, key: str, value: Any) -> None:
    kept = bool(value) is MARKS[key]
    assert trained(tmp_path, marked({2: {key: value}})) == ("bad" + END) * kept + "good" + END


def weights(store: Store) -> dict[float, str]:
    """Return the texts of a row's trained tokens by their weights, as its sample holds them."""
    sample = Samples.of([usable_of(store, 4096, "skip")], [0])[0]
    ids, mask = sample["input_ids"], sample["loss_mask"]
    column = sample.get("loss_weights", torch.ones(len(ids)))
    return {w: TOKENIZER.decode(ids[(column == w) & mask]) for w in set(column[mask].tolist())}


@pytest.mark.parametrize(
    ("marks", "train_on", "expected"),
    [
        ({2: {"weight": 0.5}}, ("assistant",), {0.5: "bad" + END, 1.0: "good" + END}),
        ({2: {"weight": 2, "train": True}, 4: {"loss_scale": 0}}, ("assistant",), {2.0: "bad" + END}),
        ({2: {"weight": 0.5}, 4: {"weight": 3}}, ("last",), {3.0: "good" + END}),
        (
            {1: {"weight": 0.5}, 4: {"weight": 0}},
            ("assistant", "user"),
            {0.5: "first?", 1.0: f"bad{END}second?\nplease"},
        ),
        ({2: {"weight": 1}}, ("assistant",), {1.0: f"bad{END}good{END}"}),
    ],
)
def test_weights_of_messages_reach_the_sample(tmp_path: Path, marks: Any, train_on: Any, expected: Any) -> None:
    assert weights(stored(tmp_path, marked(marks), *train_on)) == expected


def test_weights_in_a_whole_row_are_those_of_the_turns_tokens(tmp_path: Path) -> None:
    found = weights(stored(tmp_path, marked({2: {"weight": 0.5}}), "all"))
    assert found[0.5] == "bad" + END
    assert "good" + END in found[1.0]


@pytest.mark.parametrize(("weight", "expected"), [(0, {1.0: END}), (0.5, {0.5: "<think>hm</think>", 1.0: "yo" + END})])
def test_reasoning_is_weighed(tmp_path: Path, weight: float, expected: Any) -> None:
    talk = [TALK[1], {"role": "assistant", "content": "<think>hm</think>yo"}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n")
    found = weights(tokenize_file(path, Columns(reasoning_weight=weight), TOKENIZER, None, tmp_path / "tokens"))
    assert {w: text.replace("yo", "") if w == 1 and not weight else text for w, text in found.items()} == expected


def test_rows_of_tokens_keep_their_weights(tmp_path: Path) -> None:
    ids = TOKENIZER("first? good")["input_ids"]
    labels = [-100, *ids[1:]]
    column = [1, *([0.5] * (len(ids) - 2)), 0]
    assert weights(stored(tmp_path, {"input_ids": ids, "labels": labels, "loss_weights": column})) == {
        0.5: TOKENIZER.decode(ids[1:-1])
    }
    assert weights(stored(tmp_path, {"input_ids": ids, "loss_weights": column}, "all")) == {
        1.0: TOKENIZER.decode(ids[1:])
    }
    for wrong, words in (
        ({"loss_weights": [1]}, "1 values for"),
        ({"labels": [7] * len(ids)}, "neither its id nor -100"),
        ({"loss_mask": [-1] * len(ids)}, "numbers of at least 0"),
        ({"input_ids": [10**6]}, "none of the tokenizer's"),
        ({"input_ids": ["a"]}, "expected token ids"),
    ):
        with pytest.raises(ValueError, match=words):
            stored(tmp_path, {"input_ids": ids, **wrong})
    with pytest.raises(ValueError, match="rows are tokens and not messages"):
        stored(tmp_path, {"input_ids": ids}, "last")


def test_a_mark_is_not_the_templates_and_null_is_none(tmp_path: Path) -> None:
    plain = stored(tmp_path, marked({}))
    ids, mask = (values.tolist() for values in plain.tokens(0))
    for marks in ({2: {"weight": None}}, {2: {"weight": 1}, 4: {"train": True, "masked": False}}):
        assert [values.tolist() for values in stored(tmp_path, marked(marks)).tokens(0)] == [ids, mask]
    other = stored(tmp_path, marked({2: {"weight": 0}}))
    assert other.tokens(0)[0].tolist() == ids
    assert other.key(0) != plain.key(0)


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({2: {"masked": 0.5}}, "masked 0.5: it is masked"),
        ({2: {"weight": -1}}, "weight -1: it is true, false or a weight"),
        ({2: {"train": "no"}}, "train 'no': it is true, false or a weight"),
        ({2: {"loss": float("nan")}}, "loss nan: it is true"),
        ({2: {"weight": 1, "train": False}}, "marks that contradict each other"),
        ({2: {"weight": 0.5, "loss_scale": 2}}, "marks that contradict each other"),
        ({2: {"train_detail": [{"begin_offset": 0}]}}, "'train_detail': it marks parts"),
        ({1: {"weight": 1}}, "message 2, of role 'user', is marked to be trained.*add user to --train-on"),
    ],
)
def test_a_mark_that_cannot_be_obeyed_is_refused(tmp_path: Path, marks: dict[int, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"a.jsonl, line 1: .*{words}"):
        stored(tmp_path, marked(marks))


@pytest.mark.parametrize(
    ("train_on", "marks", "text"),
    [
        (["assistant"], {}, f"bad{END}good{END}"),
        (["last"], {}, f"good{END}"),
        (["last"], {2: {"weight": 1}}, f"good{END}"),
        (["user"], {}, "first?second?\nplease"),
        (["user", "assistant"], {}, f"first?bad{END}second?\npleasegood{END}"),
        (["user", "assistant"], {1: {"train": True}, 2: {"train": False}}, f"first?second?\npleasegood{END}"),
        (["system"], {}, "be\nbrief"),
    ],
)
def test_roles_and_the_last_turn(tmp_path: Path, train_on: list[TrainOn], marks: dict[int, Any], text: str) -> None:
    assert trained(tmp_path, marked(marks), *train_on) == text


def test_a_last_turn_that_is_not_to_be_trained_leaves_nothing(tmp_path: Path) -> None:
    assert stored(tmp_path, marked({4: {"weight": 0}}), "last").trained.tolist() == [0]


def test_all_is_everything_but_what_is_marked(tmp_path: Path) -> None:
    whole = TOKENIZER.apply_chat_template(TALK, tokenize=False)
    assert trained(tmp_path, marked({}), "all") == whole
    left = trained(tmp_path, marked({1: {"train": False}, 2: {"weight": 0}}), "all")
    assert left == whole.replace("first?", "").replace("bad" + END, "")


def test_a_completion_is_masked_as_trl_does(tmp_path: Path) -> None:
    """By TRL's own way: the tokens of the prompt with a generation prompt are not trained, all behind them are."""
    row = {"prompt": TALK[:2], "completion": TALK[2:]}
    prompt = TOKENIZER.apply_chat_template(TALK[:2], add_generation_prompt=True, tokenize=True)["input_ids"]
    whole = TOKENIZER.apply_chat_template(TALK, tokenize=True)["input_ids"]
    assert whole[: len(prompt)] == prompt
    ids, mask = stored(tmp_path, row, "completion").tokens(0)
    assert ids.tolist() == whole
    assert mask.tolist() == [place >= len(prompt) for place in range(len(whole))]
    assert trained(tmp_path, row) == f"bad{END}good{END}"
    assert trained(tmp_path, row, "last") == f"good{END}"
    assert trained(tmp_path, {"prompt": "a b", "completion": "c"}, "completion") == "c" + str(TOKENIZER.eos_token)
    assert trained(tmp_path, {"prompt": "ab", "completion": "c"}, "all") == "b" + "c" + str(TOKENIZER.eos_token)


def test_a_choice_without_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="goes with rows of a prompt and its completion"):
        stored(tmp_path, marked({}), "completion")
    for row in ({"text": "a"}, {"prompt": "a", "completion": "b"}):
        with pytest.raises(ValueError, match=r"--train-on last has no meaning for a\.jsonl"):
            stored(tmp_path, row, "last")


def test_keys_that_nobody_reads_are_told(tmp_path: Path) -> None:
    """Also where the tokens are there already. What the template speaks of, and marks, are read."""
    assert "reasoning_content" in str(TOKENIZER.chat_template)
    marks = {2: {"reasoning_content": "hm", "name": "x", "weight": 0}, 4: {"wieght": 0, "score": 3}}
    path = tmp_path / "a.jsonl"
    path.write_text("\n" + "".join(json.dumps(row) + "\n" for row in (marked({}), marked(marks), marked(marks))))
    for _ in range(2):
        said: list[str] = []
        tokenize_file(path, Columns(), TOKENIZER, None, tmp_path / "tokens", log_line=said.append)
        assert said[0] == "a.jsonl: OpenAI messages rows, of which messages is read"
        assert [line.split(", which")[0] for line in said[1:]] == [
            f"a.jsonl: messages of 2 rows have '{key}'" for key in ("score", "wieght")
        ]
        assert all(line.endswith("(first: line 3)") for line in said[1:])


@given(st.dictionaries(st.sampled_from([*MARKS, "content", "name"]), st.none() | st.booleans() | st.integers(-1, 2)))
@settings(max_examples=200)
def test_a_message_loses_its_marks_alone(message: dict[str, Any]) -> None:
    try:
        plain, mark = split_marks(message)
    except ValueError:
        return
    assert plain == {key: value for key, value in message.items() if key not in MARKS}
    given_marks = {float(v if MARKS[k] else not v) for k, v in message.items() if k in MARKS and v is not None}
    assert ({mark} if mark is not None else set()) == (given_marks if len(given_marks) < 2 else given_marks - {1.0})
