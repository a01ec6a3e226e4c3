"""What a user brings: found by name, refused with the fix; rows dealt among environments by their shares."""

import asyncio
import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.common.data.prompts import Prompt
from apps.common.data.template_options import template_options
from apps.common.plugins import load_environment, load_reward, load_tools
from apps.grpo.config import DataConfig, GrpoConfig, PluginConfig
from apps.grpo.tasks.environment_tasks import make_environment_tasks
from apps.grpo.tasks.prompt_tasks import PromptTasks
from apps.grpo.testing.plugins import Digits
from rollout import EpisodeContext, Reply, Score, TaskRow
from rollout.environments.environment import End
from rollout.environments.mixed_tasks import EnvironmentTasks, HeldOutTasks, prompts_per_environment
from rollout.environments.system_prompt import SystemPrompt, with_system_prompt

EXAMPLES = "apps.grpo.testing.plugins"
FILE = str(Path(__file__).parents[1] / "testing" / "plugins.py")


@pytest.mark.parametrize("place", [EXAMPLES, FILE])
def test_things_are_found_by_module_and_by_file(place: str) -> None:
    assert load_environment(f"{place}:Digits").__name__ == "Digits"
    assert load_reward(f"{place}:by_reference")(Reply("it is 18", ""), "18", {}, ()) == 1.0
    assert [tool.name for tool in load_tools([f"{place}:echo", f"{place}:SLOW"])] == ["echo", "slow"]


def test_a_function_that_makes_a_tool_is_called_once() -> None:
    """It may start a server; a step has a task a row, each with these tools."""
    first, second = (load_tools([f"{EXAMPLES}:echo"]) for _ in range(2))
    assert first[0] is second[0]


def test_a_system_prompt_leaves_the_rest_of_a_factory_as_it_is() -> None:
    def plain() -> Digits:
        return Digits()

    factory: Any = plain
    factory.timeout, factory.instant = 3.0, True
    prompted: Any = SystemPrompt("Be brief.")(factory)
    assert (prompted.timeout, prompted.instant, prompted.__qualname__) == (3.0, True, factory.__qualname__)
    factory.run_group = print
    with pytest.raises(ValueError, match=r"--system-prompt can't reach .*plain"):
        SystemPrompt("Be brief.")(factory)


def test_a_reward_is_given_what_it_asks_for_and_can_be_sent_to_another_process() -> None:
    reward = pickle.loads(pickle.dumps(load_reward(f"{EXAMPLES}:by_everything")))
    actual = asyncio.run(reward(Reply("four", ""), "x", {"a": 1, "b": 2}, ()))
    assert actual == Score(4.0, {"row": 2.0, "results": 0.0})


@pytest.mark.parametrize(
    ("name", "end", "earned"),
    [
        ("by_end", "done", 1.0),
        ("by_end", "length", -1.0),
        ("by_end", "max_tokens", -1.0),
        ("by_reference", "done", 1.0),
        ("by_reference", "length", 0.0),  # it holds the reference, and was cut off
    ],
)
def test_a_reward_that_names_end_scores_cut_off_answers_and_others_are_not_asked(
    name: str, end: End, earned: float
) -> None:
    reward = pickle.loads(pickle.dumps(load_reward(f"{EXAMPLES}:{name}")))
    prompts = [Prompt(({"role": "user", "content": "9+9"},), "18", 1)]
    tasks = pickle.loads(pickle.dumps(PromptTasks(prompts, prompts, reward, held_out_name="eval")))

    async def play() -> Score:
        environment = tasks.environment(tasks.held_out()[0])()
        await environment.step(Reply("it is 18", "it is 18", finished=end == "done"))
        score: Score = await environment.finish(end)
        return score

    assert asyncio.run(play()) == Score(earned)


@pytest.mark.parametrize(
    ("load", "spec", "text"),
    [
        (load_environment, "Digits", "FILE.py:NAME or package.module:name"),
        (load_environment, "nowhere.py:Digits", "no file .*nowhere.py"),
        (load_environment, f"{EXAMPLES}:Digit", "did you mean Digits"),
        (load_environment, f"{EXAMPLES}:NUMBER", "is a int"),
        (load_environment, f"{EXAMPLES}:Halved", "no async method step, finish, close"),
        (load_environment, f"{EXAMPLES}:NeedsArgument", "wants level to be made"),
        (load_reward, f"{EXAMPLES}:NUMBER", "a function is needed"),
        (load_reward, f"{EXAMPLES}:by_others", "takes .completion, solution.: name its arguments reply, reference"),
        (lambda spec: load_tools([spec]), f"{EXAMPLES}:NUMBER", "a rollout.Tool, or a function"),
        (lambda spec: load_tools([spec]), f"{EXAMPLES}:by_end", r"takes \(.*\): name a rollout.Tool"),
        (lambda spec: load_tools([spec]), "mcp: ", "need"),  # a package, or a command
        (lambda spec: load_tools([spec]), "math:sin", r"takes \(x\): name a rollout.Tool"),
        (lambda spec: load_tools([spec, spec]), f"{EXAMPLES}:echo", "called 'echo' already"),
    ],
)
def test_what_cannot_be_used_is_refused(load: Callable[[str], object], spec: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        load(spec)


def test_a_tool_whose_sandbox_is_refused_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"--tool .*:boxed: Python from a model is not run here"):
        load_tools([f"{EXAMPLES}:boxed"])


def test_options_of_the_template() -> None:
    words = ["enable_thinking=false", "depth=3", "style=plain text", 'name="3"']
    assert template_options(words) == {"enable_thinking": False, "depth": 3, "style": "plain text", "name": "3"}
    for bad in (["enable_thinking"], ["a b=1"], ["x=1", "x=2"], ["tools=[]"], ["add_generation_prompt=false"]):
        with pytest.raises(ValueError, match="--template-options"):
            template_options(bad)


def test_a_system_prompt_stands_before_the_environments_own_words() -> None:
    opening = asyncio.run(SystemPrompt("Be brief.")(Digits)().open(EpisodeContext("t", data={"number": 7})))
    assert [m["content"] for m in opening.messages] == ["Be brief.", "say 7"]
    own = [{"role": "system", "content": "Count."}, {"role": "user", "content": "1"}]
    assert [m["content"] for m in with_system_prompt(own, "Be brief.")] == ["Be brief.\n\nCount.", "1"]


def settings(*names: str, tasks: Path | None = None, seed: int = 0, **more: Any) -> GrpoConfig:
    own = PluginConfig(environment=tuple(f"{EXAMPLES}:{name}" for name in names), tasks=tasks, **more)
    return GrpoConfig(recipe="environment", plugins=own, seed=seed, data=DataConfig(eval_prompts=4, eval_share=0.05))


def write(path: Path, counts: Mapping[str, int]) -> Path:
    rows = [{"environment": name, "number": i} for name, count in counts.items() for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def names_of(rows: Iterable[TaskRow]) -> Counter[str]:
    return Counter(row.environment for row in rows)


def test_several_environments_share_a_file_by_a_column(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"Digits": 60, "Letters": 20})
    tasks = make_environment_tasks(settings("Digits", "Letters", tasks=path))
    assert isinstance(tasks, EnvironmentTasks)
    assert names_of(tasks.held_out()) == {"Digits": 3, "Letters": 1}
    steps = [tasks.tasks(step, 8) for step in range(4)]
    assert [names_of(rows) for rows in steps] == [{"Digits": 6, "Letters": 2}] * 4
    for row in [*tasks.held_out(), *(row for rows in steps for row in rows)]:
        assert tasks.environment(row).__name__ == row.data["environment"] == tasks.environment_of(row)
    held_out = {json.dumps(row.data) for row in tasks.held_out()}
    assert not held_out & {json.dumps(row.data) for rows in steps for row in rows}
    by_words = settings("Digits", "Letters", tasks=path, environment_shares=("Digits=1", "Letters=3"))
    assert names_of(make_environment_tasks(by_words).tasks(0, 8)) == {"Digits": 2, "Letters": 6}


def test_an_environment_of_share_0_is_evaluated_on_all_its_rows_and_never_trained(tmp_path: Path) -> None:
    """By rows of a file, and by numbered tasks."""
    path = write(tmp_path / "a.jsonl", {"Digits": 60, "Letters": 3})
    made = (
        make_environment_tasks(settings("Digits", "Letters", tasks=file, environment_shares=("Digits=2", "Letters=0")))
        for file in (path, None)
    )
    for tasks, many in zip(made, (3, 4), strict=True):
        assert names_of(tasks.held_out())["Letters"] == many
        assert [names_of(tasks.tasks(step, 5)) for step in range(3)] == [{"Digits": 5}] * 3
        again = pickle.loads(pickle.dumps(tasks))
        again.restore(json.loads(json.dumps(tasks.cursor())))
        assert again.tasks(3, 4) == tasks.tasks(3, 4)
    with pytest.raises(ValueError, match="the tasks of 'Letters' are held out: none trains at step 0"):
        HeldOutTasks("Letters", ()).tasks(0, 1)


def test_an_environment_that_brings_its_tasks_is_asked_for_them_by_its_own_ids(tmp_path: Path) -> None:
    """Beside one that has its rows in a file."""
    path = write(tmp_path / "a.jsonl", {"Digits": 8})
    tasks = make_environment_tasks(settings("Listed", "Digits", tasks=path))
    rows = [*tasks.held_out(), *tasks.tasks(0, 14)]
    assert names_of(rows) == {"Listed": 8, "Digits": 8}
    assert {row.id for row in rows if row.environment == "Listed"} == {f"n{number}" for number in range(8)}
    assert {row.key for row in rows if row.environment == "Digits"} == {
        f"Digits/row-{number}" for number in range(1, 9)
    }
    assert len({row.seed(0) for row in rows}) == 16
    with pytest.raises(ValueError, match="--tasks has no effect: Listed bring tasks of their own"):
        make_environment_tasks(settings("Listed", tasks=path))


def test_shares_hold_over_steps_of_odd_counts() -> None:
    tasks = make_environment_tasks(settings("Digits", "Letters"))
    assert names_of(row for step in range(4) for row in tasks.tasks(step, 3)) == {"Digits": 6, "Letters": 6}


def test_tasks_without_a_file_are_numbered_and_held_out_ones_apart() -> None:
    tasks = make_environment_tasks(settings("Digits"))
    assert [row.data["number"] for row in tasks.held_out()] == [0, 1, 2, 3]
    assert [row.data["number"] for row in (*tasks.tasks(0, 3), *tasks.tasks(1, 2))] == [4, 5, 6, 7, 8]
    assert tasks.tasks(1, 2) == tasks.tasks(1, 2)


@pytest.mark.parametrize("with_file", [True, False])
def test_a_resumed_run_asks_what_the_first_would_have_asked(with_file: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"Digits": 30, "Letters": 20}) if with_file else None
    first, again = (make_environment_tasks(settings("Digits", "Letters", tasks=path)) for _ in range(2))
    for step in range(3):
        first.tasks(step, 7)
    again.tasks(0, 7)
    again.restore(json.loads(json.dumps(first.cursor())))
    assert [again.tasks(step, 5) for step in (3, 4)] == [first.tasks(step, 5) for step in (3, 4)]
    with pytest.raises(ValueError, match="begun with other environments"):
        make_environment_tasks(settings("Digits")).restore(first.cursor())
    assert pickle.loads(pickle.dumps(first)).tasks(5, 3) == first.tasks(5, 3)


@given(
    st.lists(st.just(0.0) | st.floats(0.01, 1), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
def test_every_environment_has_its_share_to_within_one(weights: list[float], counts: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    dealt = [0] * len(shares)
    for count in counts:
        more = prompts_per_environment(count, shares, dealt)
        assert sum(more) == count
        assert min(more) >= 0
        dealt = [a + b for a, b in zip(dealt, more, strict=True)]
        assert all(abs(d - share * sum(dealt)) < 1 for d, share in zip(dealt, shares, strict=True))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda path: settings("Digits", "Digits"), "one name"),
        (lambda path: settings(), "add --environment"),
        (lambda path: settings("Digits", tasks=Path("nowhere.jsonl")), "no such data file"),
        (lambda path: settings("Letters", "Closed", tasks=path), "line 1 is for the environment 'Digits'"),
        (lambda path: settings("Digits", "Letters", tasks=path, environment_column="kind"), "no column 'kind'"),
        (lambda path: settings("Digits", "Letters", tasks=path, environment_shares=("Digits=1",)), "one for each of"),
        (lambda path: settings("Digits", "Letters", environment_shares=("Digits=x", "Letters=1")), "NAME=NUMBER"),
        (lambda path: settings("Digits", "Letters", environment_shares=("Digits=-1", "Letters=1")), "of at least 0"),
        (lambda path: settings("Digits", "Letters", environment_shares=("Digits=0", "Letters=0")), "nothing to train"),
        (lambda path: settings("Digits", environment_shares=("Digits=1",)), "no effect with one environment"),
        (lambda path: settings("Digits", reward=f"{EXAMPLES}:by_reference"), "--reward goes with --data"),
        (lambda path: settings("Digits", "Letters", "Closed", tasks=path), "no row for the environment 'Closed'"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[Path], GrpoConfig], text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"Digits": 5, "Letters": 5})
    with pytest.raises(ValueError, match=text):
        make_environment_tasks(make(path))


def test_a_function_with_typed_arguments_is_a_tool(tmp_path: Path) -> None:
    file = tmp_path / "prices.py"
    file.write_text(
        'def price(name: str) -> str:\n    """Look a price up."""\n    return "3"\n\ndef bad(x):\n    ...\n'
    )
    (tool,) = load_tools([f"{file}:price"])
    assert (tool.name, tool.description, tool.run(name="tea")) == ("price", "Look a price up.", "3")
    with pytest.raises(ValueError, match=r"--tool .*bad takes \(x\): name a rollout.Tool.*argument 'x' has no type"):
        load_tools([f"{file}:bad"])
