"""Episodes as the page reads them."""

import pytest

from runlog.episodes import table_row, view

EPISODE = {
    "step": 3, "reward": 1, "group": 2, "tokens": ["a", "b", "c"], "mask": [False, True, True], "advantage": 0.5,
    "log_probs": [0.0, -0.123456, -1.0], "versions": [-1, 2, 2],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": {"x": "1"}}}]},
    ],
    "metadata": {"end": "done"},
}  # fmt: skip


def test_a_view() -> None:
    shown = view(EPISODE, 7, 100)
    assert shown["advantage"] == [0.0, 0.5, 0.5]  # one number is that of the trained tokens
    assert shown["mask"] == [0, 1, 1]
    assert shown["log_probs"] == [0.0, -0.1235, -1.0]
    assert (shown["id"], shown["length"], shown["trained"], shown["calls"]) == (7, 3, 2, 1)
    assert shown["messages"] == [
        {"role": "user", "content": "hi\n[image]"},
        {"role": "assistant", "content": "", "reasoning": "hm", "calls": [{"name": "f", "arguments": '{"x": "1"}'}]},
    ]


def test_only_the_step_is_needed() -> None:
    shown = view({"step": 1}, 0, 10)
    assert (shown["tokens"], shown["reward"], shown["mask"], shown["trained"]) == ([], None, None, None)


def test_a_long_episode_loses_its_middle() -> None:
    tokens = [str(i) for i in range(100)]
    shown = view({"step": 1, "tokens": tokens, "mask": [i % 2 for i in range(100)]}, 0, 11)
    assert shown["tokens"] == [*tokens[:5], *tokens[-6:]]
    assert shown["mask"] == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1]
    assert (shown["cut"], shown["head"], shown["length"], shown["trained"]) == (89, 5, 100, 50)


def test_lists_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"episode 4 \(step 1\): 1 mask for 2 tokens"):
        view({"step": 1, "tokens": ["a", "b"], "mask": [True]}, 4, 10)


def test_texts_are_bounded() -> None:
    texts = {"expected": "e" * 99, "error": "x" * 99, "metadata": {"a": "m" * 99}}
    shown = view({"step": 1, "messages": [{"role": "user", "content": "c" * 99}], **texts}, 0, 10, max_characters=5)
    assert (shown["expected"], shown["error"], shown["metadata"]["a"]) == ("e" * 5, "x" * 5, "m" * 5)
    assert shown["messages"][0]["content"] == "c" * 5


def test_what_else_an_episode_can_tell() -> None:
    told = {"expected": 18, "parts": {"format": 0.5}, "error": "boom", "split": "held-out", "environment": "maze"}
    shown = view({"step": 1, **told}, 0, 10)
    assert {key: shown[key] for key in told} == told | {"expected": "18"}
    assert view({"step": 1}, 0, 10)["split"] == "training"


def test_a_row_of_a_table_has_prompt_and_completion() -> None:
    mask = [False, False, True, False]
    episode = {"step": 3, "group": 1, "tokens": ["2+2", "=", "4", "!"], "mask": mask, "reward": 1}
    row = table_row({**episode, "advantage": 0.5, "parts": {"right": 1}})
    assert (row["prompt"], row["completion"], row["group"]) == ("2+2=", "4!", "1")
    assert (row["reward"], row["reward/right"], row["advantage"]) == (1.0, 1.0, 0.5)
    one_a_token = table_row({**episode, "mask": [False, False, True, True], "advantage": [0.0, 0.0, -0.5, -0.5]})
    assert one_a_token["advantage"] == -0.5
    assert table_row({"step": 1}) == {
        **dict.fromkeys(("environment", "group", "expected", "reward", "advantage", "error")),
        "step": 1,
        "split": "training",
        "prompt": "",
        "completion": "",
    }
