"""Code of a user's for the choices of an app: found, told, recorded, and refused with what would be right."""

import json
import pickle
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from apps.common.cli.extensions import OWN_CODE, POINTS, help_of, own_code, points_of, write_own_code
from apps.common.own_metrics import own_metrics
from apps.common.tool_formats import format_of
from apps.grpo.config import GrpoConfig, PluginConfig
from apps.grpo.main import configure
from apps.grpo.registry import registered, spec_of
from apps.grpo.tasks.environment_tasks import make_environment_tasks
from apps.sft.config import SftConfig
from apps.sft.main import configure as configure_sft
from rollout import TaskRow
from runplan.report.plan import make_plan

SOURCE = """
from dataclasses import dataclass, replace
from chat_tools import Format, Json
from rollout import Task, TaskRow
from schedules import SamplerBackend, SyncSchedule

def advantage(rewards, groups, scale: float = 1.0):
    return scale * rewards

def loss(tokens, tau: float = 0.5):
    return -tau * tokens.log_probs

def reward(reply, reference, least: int = 1):
    return least * float(reference in reply.text)

class World:
    def __init__(self, size: int = 3):
        self.size = size
    async def open(self, context): ...
    async def step(self, reply): ...
    async def finish(self, end): ...
    async def close(self): ...

@dataclass
class Source:
    seed: int
    held_out_count: int = 2
    at: int = 0
    def tasks(self, step, count):
        self.at += count
        return [TaskRow(f"{self.at}-{i}") for i in range(count)]
    def held_out(self):
        return [TaskRow(f"held-{i}") for i in range(self.held_out_count)]
    def environment(self, row):
        return Task(({"role": "user", "content": row.id},), lambda reply, results: 0.0)
    def cursor(self):
        return {"at": self.at}
    def restore(self, cursor):
        self.at = cursor["at"]

class Sampler(SamplerBackend):
    def __init__(self, width: int = 2):
        self.width = width
    def build(self, config, model, version): ...
    def dtype(self, config, model, engine): return "float32"

def schedule(parts, every: int = 1):
    return SyncSchedule(parts.sampled_here, parts.trainer, parts.run)

def metric(step, metrics, factor: float = 2.0):
    return {"mine": factor * step}

def clash(metrics):
    return {"loss": 1.0}

def text(step):
    return "many"

def tool_format(begin: str = "<c>"):
    return Format("mine", calls=((begin, "</c>"),), body=Json(), ends=("<|im_end|>",))

def recipe(size: int = 4):
    from apps.grpo.recipes.environment import RECIPE
    return replace(RECIPE, config=replace(RECIPE.config, group_size=size))
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with own.py, in which the user is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUILD_WORKING_DIRECTORY", raising=False)
    (tmp_path / "own.py").write_text(SOURCE)
    return tmp_path


ALL = (
    *("--advantage", "own.py:advantage", "--advantage-options", "scale=2", "--loss", "own.py:loss"),
    *("--loss-options", "tau=0.1", "--environment", "own.py:World", "--environment-options", "size=5"),
    *("--schedule", "own.py:schedule", "--schedule-options", "every=2", "--rollout.engine", "own.py:Sampler"),
    *("--sampler-options", "width=3", "--metric", "own.py:metric", "--metric-options", "factor=3"),
    *("--recipe", "own.py:recipe", "--recipe-options", "size=6"),
)
WANTED: dict[str, dict[str, Any]] = {
    "advantage": {"scale": 2.0},
    "loss": {"tau": 0.1},
    "environment": {"size": 5},
    "recipe": {"size": 6},
    "sampler": {"width": 3},
    "schedule": {"every": 2},
    "metric": {"factor": 3.0},
}


def test_the_apps_have_the_choices() -> None:
    assert [point.kind for point in points_of(GrpoConfig)] == [point.kind for point in POINTS]
    assert [point.kind for point in points_of(SftConfig)] == [
        "loss",
        "recipe",
        "sampler",
        "schedule",
        "metric",
        "model-family",
    ]


def test_names_and_options_reach_the_configuration_the_plan_and_the_record(file: Path) -> None:
    config = configure(ALL)
    assert config.group_size == 6
    assert {code.kind: code.options for code in own_code(config)} == WANTED
    assert all(code.name.startswith(f"{file}/own.py:") and code.sha256 for code in own_code(config))
    assert pickle.loads(pickle.dumps(config)) == config
    assert f"advantage {file}/own.py:advantage(scale=2.0), sha256" in str(make_plan(spec_of(config)))
    assert write_own_code(config, file) == []
    assert write_own_code(config, file) == []
    (start,) = json.loads((file / OWN_CODE).read_text())
    assert {one["kind"]: one["options"] for one in start} == WANTED


def test_a_resumed_run_tells_other_files_and_options(file: Path) -> None:
    write_own_code(configure(ALL), file)
    (file / "own.py").write_text(SOURCE + "# more\n")
    lines = write_own_code(configure([*ALL, "--loss-options", "tau=0.2"]), file)
    assert f"--loss {file}/own.py:loss: its options changed since the run's last start" in lines
    assert sum("its file changed" in line for line in lines) == len(WANTED)
    assert len(json.loads((file / OWN_CODE).read_text())) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss own.py:loss --loss-options taw=1", "--loss-options: there is no option 'taw', did you mean tau?"),
        ("--loss own.py:loss --loss-options tau=x", "--loss-options: tau: float = 0.5 can't be 'x'"),
        ("--loss own.py:lose", "has no 'lose' for --loss; did you mean loss"),
        ("--loss ppa", "use one of ppo, cispo, gspo, gmpo, sapo, dppo_tv, dppo_kl, clip_cov, kl_cov, or FILE.py:NAME"),
        ("--loss-options tau=1", "--loss-options: there is no option 'tau' (ppo; it has no options)"),
        ("--advantage own.py:advantage --advantage-options x=1", "--advantage-options: there is no option 'x'"),
        ("--schedule own.py:schedule --schedule-options x=1", "--schedule-options: there is no option 'x'"),
        ("--rollout.engine own.py:Sampler --sampler-options x=1", "--sampler-options: there is no option 'x'"),
        ("--sampler-options x=1", "--sampler-options x=1 has no effect: engine 'native' has no options"),
        ("--metric own.py:metric --metric-options x=1", "--metric-options: there is no option 'x'"),
        ("--metric-options x=1", "--metric-options has no effect without --metric"),
        ("--reward-options x=1", "--reward-options has no effect without --reward"),
        ("--tool-format own.py:World", "is a World: a chat_tools.Format is needed"),
        ("--recipe own.py:recipe --recipe-options x=1", "--recipe-options: there is no option 'x'"),
        ("--recipe own.py:loss", "--recipe-options: tokens must be given"),
        ("--model-family llama", "--model-family must be FILE.py:NAME"),
        ("--advantage nowhere.py:x", "there is no file"),
    ],
)
def test_what_is_wrong_is_told_with_the_flag(file: Path, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        configure(words.split())


def test_several_wrong_options_are_told_at_once(file: Path) -> None:
    words = "--loss own.py:loss --loss-options taw=1 --schedule own.py:schedule --schedule-options x=1 --group-size 0"
    with pytest.raises(ValueError, match="taw") as refused:
        configure(words.split())
    assert "--schedule-options: there is no option 'x'" in str(refused.value)
    assert "--group-size must be at least 1" in str(refused.value)


def test_help_has_the_protocol_and_the_options(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        configure(["--help-loss", "own.py:loss"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "--loss-options NAME=VALUE" in told
    assert "advantages f32[T]" in told
    assert "Options of own.py:loss: tau: float = 0.5" in told
    with pytest.raises(ValueError, match="there are --help-loss, --help-recipe"):
        help_of("reward", SftConfig)


def test_a_task_source_goes_on_in_another_process(file: Path) -> None:
    plugins = PluginConfig(task_source=f"{file}/own.py:Source", task_source_options=("held_out_count=3",))
    tasks: Any = make_environment_tasks(GrpoConfig(plugins=plugins, seed=5))
    assert (tasks.source.seed, len(tasks.held_out())) == (5, 3)
    assert [row.id for row in tasks.tasks(0, 2)] == ["2-0", "2-1"]
    other = pickle.loads(pickle.dumps(tasks))
    assert [row.id for row in other.tasks(1, 2)] == [row.id for row in tasks.tasks(1, 2)] == ["4-0", "4-1"]
    assert other.environment(TaskRow("x")).messages[0]["content"] == "x"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["own.py:clash"], "gave 'loss', which is a metric already"),
        (["own.py:text"], "gave 'text' as 'many': a number is needed"),
        (["own.py:advantage"], "takes nothing: it may name metrics, step"),
    ],
)
def test_a_metric_is_a_number_with_a_name_of_its_own(file: Path, names: Sequence[str], message: str) -> None:
    given = {"metrics": {"loss": 0.5}, "step": 3}
    assert own_metrics(["own.py:metric"], ["factor=4"], given) == {"mine": 12.0}
    with pytest.raises(ValueError, match=re.escape(message)):
        own_metrics(names, (), given)


def test_a_format_of_a_file_reads_calls(file: Path) -> None:
    assert format_of("own.py:tool_format", ("begin=<x>",)).calls == (("<x>", "</c>"),)
    assert format_of("hermes").name == "hermes"
    with pytest.raises(ValueError, match="--tool-format-options begin=1 has no effect: the format 'hermes'"):
        format_of("hermes", ("begin=1",))


def test_the_sft_app_has_recipes_and_metrics_of_a_file(file: Path) -> None:
    words = ["--metric", "own.py:metric", "--metric-options", "factor=5", "--loss", "own.py:loss", "--loss-options"]
    config = configure_sft([*words, "tau=0.1"])
    assert [(code.kind, code.options) for code in own_code(config)] == [
        ("loss", {"tau": 0.1}),
        ("metric", {"factor": 5.0}),
    ]
    with pytest.raises(ValueError, match="takes nothing: it may name metrics, step"):
        configure_sft(["--metric", "own.py:advantage"])
    with pytest.raises(ValueError, match=r"a apps\.sft\.recipe\.Recipe is needed"):
        configure_sft(["--recipe", "own.py:recipe"])


def test_a_recipe_of_a_file_is_registered_by_its_name(file: Path) -> None:
    recipe = registered("own.py:recipe", ("size=2",))
    assert (recipe.config.group_size, recipe.config.recipe) == (2, f"{file}/own.py:recipe")
    with pytest.raises(ValueError, match="--recipe-options size=2 has no effect: recipe 'math' has no options"):
        registered("math", ("size=2",))
