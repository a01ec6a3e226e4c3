"""All that refuses a run is told by the process that reads the command line, before a rank starts."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import huggingface_hub.constants
import pytest

from apps.common.cli import command_line as cli
from apps.grpo import main as grpo
from apps.grpo import run as grpo_run
from apps.quickstart.model import ensure_tiny_model
from apps.sft import main as sft
from apps.sft import run as sft_run

MAINS: dict[str, Callable[[Sequence[str]], Any]] = {"grpo": grpo.main, "sft": sft.main}
NO_EXPERTS = "expert_parallel is for models with experts"
BESIDE_EXPERTS = "master_dtype='bfloat16' has not been run with expert_parallel under FSDP2"
CASES: list[tuple[str, str, list[str]]] = [
    (
        "grpo",
        (
            "--nproc-per-node 2 --parallel.expert 2 --trainer.master-dtype bfloat16 --trainer.prove off "
            "--sampling.stop-token-ids 999999"
        ),
        [BESIDE_EXPERTS, NO_EXPERTS, "--sampling.stop-token-ids 999999 is no token"],
    ),
    (
        "grpo",
        (
            "--nproc-per-node 2 --trainer.backend megatron --parallel.tensor 2 --parallel.expert 2 "
            "--trainer.no-reshard-after-forward --rollout.tensor-parallel 2 --data nowhere.jsonl"
        ),
        [
            "need a model with experts",
            "reshard_after_forward is FSDP2's",
            "--rollout.tensor-parallel 2",
            "nowhere.jsonl",
        ],
    ),
    (
        "grpo",
        (
            "--trainer.compile on --trainer.weights replicated --trainer.optimizer-on-host "
            "--max-episode-tokens 9999999 --trainer.vision frozen"
        ),
        ["--max-episode-tokens 9999999", "vision"],
    ),
    (
        "sft",
        "--nproc-per-node 2 --parallel.expert 2 --trainer.master-dtype bfloat16 --trainer.prove off --offload",
        [BESIDE_EXPERTS, NO_EXPERTS, "--offload True"],
    ),
    (
        "sft",
        "--lora.rank 4 --lora.targets wqkv --trainer.weights replicated --trainer.compile on",
        ["no linear layer 'wqkv'", "weights='replicated' cannot be had", "compile='on' cannot be had"],
    ),
    (
        "sft",
        (
            "--nproc-per-node 3 --trainer.backend megatron --parallel.tensor 3 --trainer.transformer-options "
            "hidden_size=3 --trainer.no-reshard-after-forward"
        ),
        ["cannot be split over tensor_parallel=3", "hidden_size follows from the model", "reshard_after_forward"],
    ),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("given")
    rows = [{"question": f"{i}?", "answer": str(i), "prompt": f"{i}?", "completion": str(i)} for i in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    model = ensure_tiny_model(folder / "model", 0)
    return ["--model", str(model), "--data", str(folder / "rows.jsonl"), "--trainer.device", "cpu"]


def refused(app: str, argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of standard error, of a program that ends with status 2."""
    with pytest.raises(SystemExit) as stop:
        cli.main(lambda: MAINS[app](argv))
    assert stop.value.code == 2
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize(("app", "flags", "texts"), CASES)
def test_two_or_three_refusals_are_told_together_and_nothing_is_started(
    app: str,
    flags: str,
    texts: list[str],
    given: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def launch(*_: object) -> NoReturn:
        pytest.fail("a rank was started")

    monkeypatch.setattr(grpo_run, "launch", launch)
    monkeypatch.setattr(sft_run, "launch", launch)
    run_dir = tmp_path / "run"
    lines = refused(app, [*given, *flags.split(), "--run-dir", str(run_dir)], capsys)
    for text in texts:
        assert [line for line in lines if text in line], (text, lines)
    assert len(set(lines)) == len(lines)
    assert not run_dir.exists()


def test_without_a_model_at_hand_all_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    flags = "--nproc-per-node 2 --parallel.expert 2 --trainer.master-dtype bfloat16 --trainer.prove off "
    flags += "--rollout.tensor-parallel 2 --run-dir"
    lines = refused("grpo", [*flags.split(), str(tmp_path / "run")], capsys)
    assert len(lines) == 4
    assert NO_EXPERTS in lines[3]
    assert BESIDE_EXPERTS in lines[0]
    assert "--rollout.tensor-parallel 2 is not supported" in lines[1]
    assert lines[2].endswith("recipe 'quickstart' can't be run with these settings; --plan says all")


def test_refusals_of_a_model_that_is_to_be_made_are_told_with_the_rest(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = "--nproc-per-node 2 --parallel.expert 2 --trainer.master-dtype bfloat16 --trainer.prove off "
    flags += f"--trainer.device cpu --run-dir {tmp_path / 'run'}"
    for app, own in (("grpo", "--max-episode-tokens 9999999"), ("sft", "--max-tokens 64")):
        lines = refused(app, [*flags.split(), *own.split()], capsys)
        assert [line for line in lines if BESIDE_EXPERTS in line]
        assert [line for line in lines if NO_EXPERTS in line], lines
        assert app == "sft" or "is over the 2048 positions of the recipe's model" in "\n".join(lines)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fetched", [False, True])
def test_refusals_of_a_model_of_the_hub_are_told_with_the_rest_before_its_weights_are_fetched(
    fetched: bool, given: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, commit = tmp_path / "models--some-lab--tiny-1.5", "a" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    here = folder / "snapshots" / commit
    shutil.copytree(given[1], here)
    if not fetched:
        (here / "model.safetensors").unlink()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    argv = ["--model", "some-lab/tiny-1.5", *given[2:], *CASES[0][1].split(), "--run-dir", str(tmp_path / "run")]
    lines = refused("grpo", argv, capsys)
    for text in CASES[0][2]:
        assert [line for line in lines if text in line], (text, lines)
    assert not [line for line in lines if "safetensors" in line]
    assert not (tmp_path / "run").exists()
    assert "no snapshot of it" in "\n".join(refused("grpo", ["--model", "some-lab/other", *argv[2:]], capsys))


def test_the_plan_has_what_the_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--parallel.expert 2 --nproc-per-node 2 --trainer.master-dtype bfloat16 --trainer.prove off"
    with pytest.raises(SystemExit) as stop:
        grpo.main([*flags.split(), "--plan"])
    assert stop.value.code == 1
    assert f"PROBLEM   {BESIDE_EXPERTS}" in capsys.readouterr().out


def test_a_plan_of_ones_own_model_has_its_memory_and_its_refusals(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for app, main in MAINS.items():
        words = [*given, "--trainer.backend", "megatron", "--parallel.pipeline", "2", "--nproc-per-node", "2"]
        with pytest.raises(SystemExit):
            main([*words, "--max-tokens" if app == "sft" else "--max-episode-tokens", "4096", "--plan"])
        text = capsys.readouterr().out
        assert "config.json" in text
        assert " layers over 2 stages" in text
        assert "GiB at the fullest moment of a step" in text
        with pytest.raises(SystemExit):
            main(["--model", "nobody/nothing-3B", "--data", "x.jsonl", "--plan"])
        assert (
            "memory, layers and time are not planned: nobody/nothing-3B is no directory here" in capsys.readouterr().out
        )


@pytest.mark.parametrize("app", MAINS)
def test_a_model_that_is_missing_hides_no_file(app: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor does one file hide another, whether it is missing or its rows are wrong."""
    bad, run_dir = tmp_path / "bad.jsonl", tmp_path / "run"
    bad.write_text('{"q": 1}\n')
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    model = ["--model", str(tmp_path / "no-model")]
    data = ["--data", str(tmp_path / "none.jsonl"), "--eval-data", str(bad)]
    lines = refused(app, [*model, *data, "--run-dir", str(run_dir), "--trainer.device", "cpu"], capsys)
    texts = ["no model directory", "holds a run already", "no such data file", "bad.jsonl, line 1: no column"]
    assert len(lines) == len(texts)
    for text in texts:
        assert [line for line in lines if text in line], (text, lines)


def test_two_files_of_bad_rows_are_told_together(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text('{"q": 1}\n')
    files = ["--data", str(tmp_path / "one.jsonl"), "--eval-data", str(tmp_path / "two.jsonl")]
    for app in MAINS:
        lines = refused(app, [*given[:2], *given[4:], *files, "--run-dir", str(tmp_path / app)], capsys)
        assert [line.split("/")[-1][:17] for line in lines if "line 1: no column" in line] == [
            "one.jsonl, line 1",
            "two.jsonl, line 1",
        ]
