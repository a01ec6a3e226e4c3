"""The launch line of a plan, copied, gives the configuration that was planned: one flag at a time, and any of them."""

import itertools
import re
import shlex
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.common.cli.command_line import CommandLine
from apps.common.cli.flags import changed, flag, leaves, plain_type
from apps.common.launch.flag import parse_launch_flag
from apps.common.run.config_file import write_config
from apps.grpo import main as grpo
from apps.grpo import registry as grpo_registry
from apps.sft import main as sft
from apps.sft import registry as sft_registry
from runplan.report.plan import make_plan

APPS: dict[str, tuple[Callable[[], CommandLine[Any]], Callable[..., Any]]] = {
    "grpo": (grpo.command_line, grpo_registry.spec_of),
    "sft": (sft.command_line, sft_registry.spec_of),
}
GIVEN = ("--model", "my model", "--data", "it's $HOME.jsonl")
TEXTS: dict[str, list[list[str]]] = {
    "--data": [["a b.jsonl"], ["$(x)'\"\\.jsonl"]],
    "--parallel.context": [["static:2"], ["dynamic"]],
    "--rollout.engine": [["vllm"]],
    "--trainer.learning-rates": [["\\.mlp\\.gate\\.=1e-5", "lora_B=2"]],
    "--trainer.transformer-options": [["a=1", "b=[1, 2]"]],
    "--rollout.vllm": [["block_size=32"]],
    "--template-options": [["enable_thinking=false"]],
    "--tool-format": [["hermes"]],
    "--env": [["A=it's;$B", "C="]],
    "--system-prompt": [["two  words\nand 'quotes'"], ["--looks like a flag"]],
    "--environment": [["my world.py:World"], ["a.b:C", "d.py:E"]],
    "--environment-shares": [["A=1", "B=2"]],
    "--trainer.betas": [["0.5", "0.75"]],
}
EXPECTED = {
    "grpo": {
        "--model",
        "--data",
        "--preset",
        "--rollout.engine",
        "--learning-rate",
        "--env",
        "--offload",
        "--logging.tracker",
    },
    "sft": {"--text-column", "--truncation", "--batch-size"},
}
"""Flags among those that were tried."""


@pytest.fixture(autouse=True, scope="module")
def own_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Write the code that flags name, in the working directory and on the path."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "a").mkdir()
    for file, name in (("my world.py", "World"), ("a/b.py", "C"), ("d.py", "E")):
        (folder / file).write_text(f"class {name}:\n    pass\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
        patch.syspath_prepend(folder)
        yield


@cache
def command_line(app: str) -> CommandLine[Any]:
    return APPS[app][0]()


def words_of(app: str, path: str, hint: Any) -> list[list[str]]:
    """Some values of a flag, as typed."""
    name = flag(path)
    if name in TEXTS:
        return TEXTS[name]
    args = [arg for arg in get_args(hint) if arg is not type(None)]
    optional: list[list[str]] = [["None"]] if type(None) in get_args(hint) else []
    if hint is bool:
        return []
    if get_origin(hint) is tuple:
        inner = words_of(app, path, args[0])
        return [[], *inner, [word for words in inner[:2] for word in words]]
    if args and get_origin(hint) is not None and str(get_origin(hint)) == "typing.Literal":
        return [[str(choice)] for choice in args]
    if args:
        return [*optional, *words_of(app, path, args[0])]
    return {int: [["1"], ["2"], ["12"]], float: [["0.1"], ["1e-7"], ["3"]], bool: [["True"], ["False"]]}.get(
        hint, [["a b"], ["it's"]]
    )


def all_flags(app: str) -> Iterator[tuple[str, ...]]:
    """Each flag with each of some values, as words of a command line."""
    line = command_line(app)
    types = {"recipe": str, "resume": str}  # neither is an override of a recipe
    for path, _, _ in leaves(line.recipes[line.default_recipe]):
        if path in line.owned or path in types:
            continue
        hint: Any = line.kind
        for part in path.split("."):
            hint = plain_type(get_type_hints(hint, include_extras=True)[part])
        hint = plain_type(line.types.get(path, hint))
        before, _, last = flag(path).removeprefix("--").rpartition(".")
        if hint is bool:
            yield (flag(path),)
            yield (f"--{before}{'.' if before else ''}no-{last}",)
        for words in words_of(app, path, hint):
            yield (f"{flag(path)}={words[0]}",) if words[:1] and words[0].startswith("-") else (flag(path), *words)


FLAGS = {app: [*all_flags(app)] for app in APPS}


def parsed(app: str, words: list[str]) -> Any:
    """The configuration, or None where it is refused."""
    try:
        return command_line(app).parse(words)
    except ValueError:
        return None


def assert_copied(app: str, config: Any) -> None:
    """Parse the launch line's words as a shell splits them."""
    plan = make_plan(APPS[app][1](config))
    line = plan.sections["Launch"][-1]
    run = [word for word in shlex.split(line) if word not in ("RUN", "--run-dir") or config.run_dir is not None]
    after = run.index("--") + 1 if "--" in run else run.index(f"apps.{app}.main") + 1
    words, _ = parse_launch_flag(run[after:])
    assert (words[0], words[1]) == ("--recipe", config.recipe)
    again = command_line(app).parse(words)
    assert again == config, changed(again, config)
    for entry in config.cluster.env:
        assert entry in run[:after]


def copied_together(app: str, entries: list[tuple[str, ...]], given: tuple[str, ...]) -> set[str]:
    """The flags of a command line of all entries that it was copied with: those that a refusal names are left out."""
    try:
        config = command_line(app).parse([*(word for entry in entries for word in entry), *given])
    except ValueError as error:
        left = [entry for entry in entries if entry[0] not in str(error)]
        half = len(entries) // 2
        parts = [left] if len(left) < len(entries) else [entries[:half], entries[half:]] if half else []
        return {name for part in parts if part for name in copied_together(app, part, given)}
    if APPS[app][1](config).needs_model and not given:
        return copied_together(app, entries, GIVEN)
    assert_copied(app, config)
    paths = {flag(path) for path in changed(config, command_line(app).recipes["quickstart"])}
    return {entry[0] for entry in entries if re.sub(r"(--|\.)no-", r"\1", entry[0]) in paths}


@pytest.mark.parametrize("app", APPS)
def test_sixteen_flags_at_a_time(app: str) -> None:
    """Each flag that some of its first values take beside others; in sft those that grpo has not. Alone:
    launch_line_alone_test."""
    values: dict[str, list[tuple[str, ...]]] = {}
    for entry in FLAGS[app]:
        if app == "grpo" or all(entry[0] != other[0] for other in FLAGS["grpo"]):
            values.setdefault(entry[0], []).append(entry)
    reached = set[str]()
    for beside, number in itertools.product(((), GIVEN), range(2)):
        left = [some[number] for name, some in values.items() if name not in reached and number < len(some)]
        for start in range(0, len(left), 16):
            reached |= copied_together(app, left[start : start + 16], beside)
    for name in EXPECTED[app] - reached:  # refused beside others
        for entry, beside in itertools.product(values[name], ((), GIVEN)):
            reached |= copied_together(app, [entry], beside)
    assert reached > EXPECTED[app]


@pytest.mark.parametrize("app", APPS)
def test_each_recipe_is_told_what_it_lacks(app: str) -> None:
    line, spec_of = command_line(app), APPS[app][1]
    for name, config in line.recipes.items():
        assert_copied(app, line.parse(["--recipe", name, *GIVEN]))
        text = make_plan(spec_of(config)).sections["Launch"][-1]
        assert ("--model DIR --data FILE" in text) == (spec_of(config).needs_model)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_flags_of_any_recipe(data: st.DataObject) -> None:
    app = data.draw(st.sampled_from(sorted(APPS)))
    recipe = data.draw(st.sampled_from(sorted(command_line(app).recipes)))
    words = data.draw(st.lists(st.sampled_from(FLAGS[app]), max_size=4))
    config = parsed(app, ["--recipe", recipe, *GIVEN, *(word for entry in words for word in entry)])
    if config is not None:
        assert_copied(app, config)


def test_a_resumed_or_shrunk_run_is_told_as_it_was_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "a run"
    run.mkdir()
    write_config(grpo.configure(["--max-steps", "7", "--run-dir", str(run)]), run)
    for words in (["--resume", "--run-dir", str(run), "--max-steps", "9"], ["--shrink=2", "--seed", "3"]):
        with pytest.raises(SystemExit):
            grpo.main([*words, "--plan"])
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Launch")]
        assert shlex.join(words) in line
