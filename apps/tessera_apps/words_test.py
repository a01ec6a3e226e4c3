"""Keyword arguments give the configuration that the flags give, and objects are found by the names that they get."""

from pathlib import Path
from typing import Any

import pytest

from apps.grpo import main as grpo
from apps.sft import main as sft
from apps.tessera_apps.words import spec_of, words_of
from rollout import Reply
from rollout.environments.load_object import load_object


def exact(reply: Reply, reference: str) -> float:
    return float(reply.text == reference)


class Holder:
    def reward(self, reply: Reply) -> float:
        return float(len(reply.text))


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model": Path("a b"), "seed": 3}, ["--model", "a b", "--seed", "3"]),
    ({"rollout": {"engine": "native"}}, ["--rollout.engine", "native"]),
    ({"rollout.engine": "native"}, ["--rollout.engine", "native"]),
    ({"lora": {"rank": 4}}, ["--lora.rank", "4"]),
    ({"max_episode_seconds": None}, ["--max-episode-seconds", "None"]),
    ({"trainer": {"betas": (0.5, 0.75)}}, ["--trainer.betas", "0.5", "0.75"]),
    ({"trainer": {"transformer_options": {"a": 1}}}, ["--trainer.transformer-options", "a=1"]),
    ({"system_prompt": "--be brief"}, ["--system-prompt=--be brief"]),
    ({"resume": True, "run_dir": "r"}, ["--resume", "--run-dir", "r"]),
    ({"resume": False}, []),
    ({"shrink": 2}, ["--shrink=2"]),
    ({"env": {"A": "1"}}, ["--env", "A=1"]),
]


@pytest.mark.parametrize(("settings", "words"), CASES)
def test_arguments_are_the_words_of_flags(settings: dict[str, Any], words: list[str]) -> None:
    assert words_of(grpo.command_line(), settings) == words


def test_a_bool_is_a_flag_or_its_opposite() -> None:
    line = sft.command_line()
    name = "engine.gradient_checkpointing"
    shown = {value: words_of(line, {name: value}) for value in (True, False)}
    assert shown[True] != shown[False]
    for value, words in shown.items():
        assert sft.configure(words).engine.gradient_checkpointing is value


def test_numbers_of_other_packages_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert words_of(grpo.command_line(), {"seed": numpy.int64(7)}) == ["--seed", "7"]


def test_what_no_flag_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="data is a set: a text, a number, a list or a dict"):
        words_of(grpo.command_line(), {"data": {"a", "b"}})


def test_a_function_is_found_by_its_module_or_here() -> None:
    """Other processes find the first; a lambda, a method and what has lost its name are in this process alone."""
    assert spec_of("reward", exact) == f"{__name__}:exact"
    lambdas = [lambda reply: 1.0, lambda reply: 2.0]
    specs = [spec_of("reward", value) for value in (*lambdas, Holder().reward)]
    assert len(set(specs)) == 3
    assert [load_object(spec, "reward") for spec in specs[:2]] == lambdas
    assert spec_of("reward", lambdas[0]) == specs[0]
    with pytest.raises(ValueError, match="no 'nothing'"):
        load_object(f"{specs[0].partition(':')[0]}:nothing", "reward")
