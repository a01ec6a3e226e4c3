from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Never

import pytest

from apps.common.cli.command_line import CommandLine, main
from apps.common.run.config_file import CONFIG_NAME, dump_config, load_config


@dataclass(frozen=True)
class Engine:
    lr: float = 1e-3
    mode: Literal["packed", "padded"] = "packed"
    betas: tuple[float, float] = (0.9, 0.95)


@dataclass(frozen=True)
class Config:
    recipe: str = "small"
    run_dir: Path | None = None
    resume: bool = False
    steps: int = 3
    engine: Engine = field(default_factory=Engine)


RECIPES = {"small": Config(), "large": Config(recipe="large", steps=100)}


def run(*argv: str, runs: Path = Path("nowhere")) -> Config:
    return CommandLine("app", Config, RECIPES, runs, default_recipe="small", fixed=("recipe",)).parse(argv)


def test_no_flags_give_the_first_recipe() -> None:
    assert run() == RECIPES["small"]


def test_a_recipe_and_overrides() -> None:
    assert run("--recipe", "large", "--learning-rate", "0.5") == replace(RECIPES["large"], engine=Engine(lr=0.5))
    assert run("--recipe=large").steps == 100


def test_a_flag_that_decides_on_the_recipe_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = CommandLine("app", Config, RECIPES, tmp_path, default_recipe="small", by_flag={"--max-steps": "large"})
    file = tmp_path / "settings.yaml"
    file.write_text("max_steps: 7\n")
    for argv in (["--max-steps", "7"], ["--max-steps=7"], ["--config", str(file)]):
        assert line.parse(argv) == replace(RECIPES["large"], steps=7)
        told = capsys.readouterr().err
        assert told == "--max-steps without --recipe: recipe large, not small; --recipe NAME takes another\n"
    for argv in ([], ["--recipe", "large", "--max-steps", "7"]):
        line.parse(argv)
        assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--recipe", "lage"), ("lage", "large")),
        (("--engine.lrr", "1"), ("--engine.lrr", "--learning-rate")),
        (("--max-steps", "many"), ("--max-steps", "many")),
        (("--engine.mode", "packd"), ("packd", "packed")),
    ],
)
def test_a_slip_is_refused_with_the_nearest_name(
    argv: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2
    printed = "".join(capsys.readouterr())
    assert all(word in printed for word in words)


def test_print_config_is_the_file_that_config_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run("--print-config", "--max-steps", "7", "--run-dir", "x")
    assert stop.value.code == 0
    path = tmp_path / "settings.yaml"
    path.write_text(capsys.readouterr().out)
    assert run("--config", str(path)) == replace(RECIPES["small"], steps=7, run_dir=Path("x"))
    assert run(f"--config={path}", "--max-steps", "8").steps == 8


def test_a_file_names_the_recipe_whose_settings_it_overrides(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("recipe: large\nlearning_rate: 0.25\n")
    assert run("--config", str(path)) == replace(RECIPES["large"], engine=replace(RECIPES["large"].engine, lr=0.25))
    assert run("--config", str(path), "--learning-rate", "2").engine.lr == 2
    path.write_text("recipe: small\nresume: true\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / CONFIG_NAME).write_text(dump_config(Config(recipe="large", steps=5)))
    with pytest.raises(ValueError, match="--recipe can't change when a run is resumed"):
        run("--config", str(path), runs=tmp_path)


def test_resume_takes_the_newest_run_and_lets_flags_override(tmp_path: Path) -> None:
    for name, steps in (("a", 5), ("b", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / CONFIG_NAME).write_text(dump_config(Config(steps=steps)))
    config = run("--resume", "--learning-rate", "2", runs=tmp_path)
    assert (config.steps, config.engine.lr, config.resume) == (6, 2.0, True)
    assert run("--resume", "--run-dir", str(tmp_path / "a")).steps == 5


def test_nothing_to_resume_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("--resume", runs=tmp_path)
    assert "nothing to resume" in capsys.readouterr().err


def test_a_file_of_another_version_lists_what_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / CONFIG_NAME
    path.write_text('{"steps": 3, "steppes": 4}')
    with pytest.raises(ValueError, match="steppes"):
        load_config(Config, path)


def test_relative_paths_are_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUILD_WORKING_DIRECTORY", str(tmp_path))
    monkeypatch.chdir("/")
    run()
    assert Path.cwd() == tmp_path


def test_a_users_error_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Never:
        raise ValueError("no such data file: x")

    with pytest.raises(SystemExit) as stop:
        main(fail)
    assert stop.value.code == 2
    assert capsys.readouterr().err == "error: no such data file: x\n"
