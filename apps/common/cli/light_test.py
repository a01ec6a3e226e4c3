"""Help, printed settings and usage errors import neither torch nor transformers; what is printed is read back."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.common.cli.flags import SettingsError, flag, leaves
from apps.common.cli.values import with_values
from apps.common.cli.yaml_config import dump_yaml, load_yaml
from apps.grpo.commands import evaluate, try_environment
from apps.grpo.config import OWNED, GrpoConfig
from apps.grpo.main import GROUPS
from apps.grpo.registry import recipes
from apps.sft.config import OWNED as SFT_OWNED
from apps.sft.config import SftConfig
from apps.sft.main import GROUPS as SFT_GROUPS
from apps.sft.registry import recipes as sft_recipes

CODE = """
import sys
from apps.{app}.main import cli, main
for name, (wanted, argv) in {lines!r}.items():
    status = 0
    try:
        cli.main(lambda: main(argv))
    except SystemExit as stop:
        status = stop.code
    barred = ["torch", "transformers"] if name.startswith("missing") else ["torch", "transformers", "numpy"]
    heavy = [name for name in barred if name in sys.modules]
    if heavy or status != wanted:
        sys.exit(f"{{name}}: {{heavy}} imported, status {{status}}")
"""
LINES: dict[str, tuple[int, Sequence[str]]] = {
    "help": (0, ["--help"]),
    "all": (0, ["--help-all"]),
    "list": (0, ["--recipe", "list"]),
    "print": (0, ["--print-config"]),
    "plan": (0, ["--plan"]),
    "plan of data": (0, ["--plan", "--data", "x.jsonl", "--trainer.backend", "megatron", "--trainer.device", "cpu"]),
    "unknown": (2, ["--max-stepz", "3"]),
    "type": (2, ["--max-steps", "three"]),
    "range": (2, ["--max-steps", "0"]),
    "peer": (2, ["--per_device_train_batch_size", "4"]),
    "recipe": (2, ["--recipe", "quikstart"]),
    "missing model": (2, ["--model", "/nowhere/model", "--data", "nowhere.jsonl"]),
    "missing data": (2, ["--data", "nowhere.jsonl"]),
}
"""What is missing comes last: files of data are looked for with numpy."""


@pytest.mark.parametrize("app", ["grpo", "sft"])
def test_answers_import_no_torch(app: str) -> None:
    """All of them in one process: what one imports stays."""
    code = CODE.format(app=app, lines=LINES)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "<class" not in done.stdout, "a type without a name for users"


def test_commands_miss_a_file_without_torch() -> None:
    names = (evaluate.__name__, try_environment.__name__)
    code = f"""
import sys
from importlib import import_module
from apps.common.cli.command_line import main
for name in {names}:
    try:
        main(lambda: import_module(name).main(["--model", "/nowhere/model", "--data", "nowhere.jsonl"]))
    except SystemExit as stop:
        assert stop.code == 2, name
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error:")] == 2 * [
        "error: no model directory /nowhere/model; --model takes a local Hugging Face directory",
        "error: no such data file: nowhere.jsonl",
    ]


def test_a_missing_file_beside_settings_of_training_is_told_before_torch_is_loaded() -> None:
    """What the machine refuses is told after it."""
    code = """
import sys
from apps.common.cli.command_line import main
from apps.grpo import main as grpo
class Errors:
    def write(self, text):
        for line in text.splitlines():
            if line.startswith("error: "):
                print("torch" in sys.modules, line)
    def flush(self): ...
sys.stderr = Errors()
main(lambda: grpo.main("--data nowhere.jsonl --rollout.tensor-parallel 2".split()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert done.returncode == 2, done.stderr
    assert lines[1] == "False error: no such data file: nowhere.jsonl"
    assert [line.split()[0] for line in lines] == ["False", "False", *["True"] * len(lines[2:])]
    assert [line for line in lines[2:] if "--rollout.tensor-parallel 2 is not supported" in line]


def test_settings_of_every_recipe_and_a_plan_import_no_torch() -> None:
    names = " ".join(f'["--recipe", "{name}", "--print-config"],' for name in recipes())
    names += '["--recipe", "qwen3-5-35b-a3b-fsdp2", "--plan", "--trainer.device", "cpu"]'
    code = f"""
import sys
from apps.grpo.main import main
for argv in ({names}):
    try:
        main(argv)
    except SystemExit as stop:
        assert stop.code == 0, argv
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "groups"), [(GrpoConfig, GROUPS), (SftConfig, SFT_GROUPS)])
def test_the_short_help_has_some_thirty_flags(kind: type, groups: dict[str, Sequence[str]]) -> None:
    shown = [path for paths in groups.values() for path in paths]
    assert 28 <= len(shown) <= 36
    assert set(shown) <= {path for path, _, _ in leaves(kind())}
    assert len({flag(path) for path, _, _ in leaves(kind())}) == len([*leaves(kind())]), "two fields have one flag"


def test_the_names_of_the_field() -> None:
    flags = {flag(path) for path, _, _ in leaves(GrpoConfig())}
    assert flags >= {"--model", "--data", "--reward", "--max-steps", "--prompts-per-step", "--group-size"}
    assert flags >= {"--learning-rate", "--rollout.gpu-memory-utilization", "--rollout.tensor-parallel"}
    groups = {name.removeprefix("--").partition(".")[0] for name in flags if "." in name}
    assert groups >= {"trainer", "parallel", "schedule", "logging", "rollout", "lora"}
    assert "engine" not in groups


TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12) | st.sampled_from(
    ["off", "no", "1e-6", "true", "null", "~", "12:30", "2024-01-01", "- a", "#x", "0x10", "1_000", ".inf", "a: b"]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "steps": st.integers(1, 10**9),
    "engine.lr": st.floats(1e-12, 10),
    "engine.betas": st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
    "engine.grad_clip": st.none() | st.floats(1e-6, 1e6),
    "engine.gradient_checkpointing": st.booleans(),
    "engine.lr_schedule": st.just("constant"),
    "cluster.rollout.tp": st.integers(1, 64),
    "plugins.system_prompt": st.none() | TEXTS.filter(str.strip),
    "plugins.tool": st.lists(TEXTS, max_size=3).map(tuple),
    "model": st.none() | TEXTS.map(lambda text: Path(text or "x")),
    "sampling.stop_token_ids": st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    "tracker": st.lists(st.sampled_from(["wandb", "mlflow"]), max_size=2).map(tuple),
}


@settings(max_examples=60, deadline=None)
@given(values=st.fixed_dictionaries(VALUES))
def test_what_is_printed_is_read_back(values: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    config = with_values(GrpoConfig(), values)
    path = tmp_path_factory.mktemp("yaml") / "settings.yaml"
    path.write_text(dump_yaml(config, OWNED), encoding="utf-8")
    read = with_values(GrpoConfig(), load_yaml(GrpoConfig, GrpoConfig(), path, OWNED))
    assert read == config
    assert dump_yaml(read, OWNED) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("recipe", [*recipes().values(), *sft_recipes().values()], ids=lambda one: one.config.recipe)
def test_every_recipe_is_read_back(recipe: Any, tmp_path: Path) -> None:
    config = replace(recipe.config, run_dir=Path("runs"))
    kind, owned = (SftConfig, SFT_OWNED) if isinstance(config, SftConfig) else (GrpoConfig, OWNED)
    path = tmp_path / "settings.yaml"
    path.write_text(dump_yaml(config, owned), encoding="utf-8")
    read = with_values(kind(), load_yaml(kind, kind(), path, owned))
    assert read == config
    assert dump_yaml(read, owned) == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_stepz: 3", "perhaps you meant max_steps"),
        ("max_steps: three", "max_steps must be a whole number, got 'three'"),
        ("max_steps: true", "max_steps must be a whole number"),
        ("trainer: {gradient_checkpointing: yes}", "must be true or false, got 'yes'"),
        ("trainer: {betas: [0.9]}", "must be a list of 2"),
        ("trainer: {compile: maybe}", "must be one of auto, on, off"),
        ("system_prompt: 5", r"must be a text \(quoted\)"),
        ("- a", "holds no settings"),
        ("a: [", "can't be read"),
    ],
)
def test_a_wrong_file_is_refused_with_its_key(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=said):
        load_yaml(GrpoConfig, GrpoConfig(), path, OWNED)


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("learning-rate: 1e-6\nparallel: {context: off}\ntrainer: {vision: off, grad_clip: 1}\n")
    values = load_yaml(GrpoConfig, GrpoConfig(), path, OWNED)
    assert values == {
        "engine.lr": 1e-6, "engine.context_parallel": "off", "engine.vision": "off", "engine.grad_clip": 1.0,
    }  # fmt: skip
