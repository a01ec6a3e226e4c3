"""A resumed run exports the weights that it reports, and goes on only with the rows that were next."""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from apps.common.cli import command_line as cli
from apps.common.run.config_file import load_config
from apps.common.run.divergence import check_loss
from apps.quickstart.model import save_tiny_model
from apps.sft import train as train_module
from apps.sft.best_checkpoint import best_checkpoint_path
from apps.sft.config import SftConfig
from apps.sft.data import load_conversations
from apps.sft.main import main, run
from apps.sft.reading.sources import Source
from apps.sft.tests.run_test import rows_of, small, weights
from apps.sft.train import Result, held_out_loss
from engines import EngineConfig, build_engine

GENTLE, HARSH = 3e-3, 0.5
"""A rate at which each step is better than the one before, and one at which each is worse."""


def config(run_dir: Path, lr: float = GENTLE, **changes: Any) -> SftConfig:
    settings: dict[str, Any] = {"eval_every": 1, "save_every": 3, "steps": 6, "export": "best"} | changes
    return small(run_dir, engine=EngineConfig(device="cpu", lr=lr, warmup_steps=0), **settings)


def exported_loss(of: SftConfig) -> float:
    """The held-out loss of what a run exported, taken anew."""
    assert of.run_dir is not None
    export = of.run_dir / "export"
    source = Source(of.run_dir / "demonstrations.jsonl")
    cache = of.run_dir.parent / "tokens"
    rows = load_conversations(of.data, [source], AutoTokenizer.from_pretrained(export), None, cache).held_out
    return held_out_loss(build_engine(replace(of.engine, model=str(export))), rows[: of.eval_rows])


def killed_after(step: int, of: SftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the next step is evaluated: what was saved after `step` is whole by then."""

    def stop(now: int, loss: float, vocab_size: int) -> None:
        check_loss(now, loss, vocab_size)
        if now == step + 1:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "check_loss", stop)
        with pytest.raises(RuntimeError, match="killed"):
            run(of)


def assert_exports_what_it_says(of: SftConfig, found: Result) -> None:
    losses = {row["step"]: row["eval/loss"] for row in rows_of(found.run_dir)}
    assert found.loss_after == losses[found.exported]
    assert exported_loss(of) == pytest.approx(found.loss_after, abs=1e-6)


def test_the_best_of_steps_that_are_done_anew_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 5 was kept as the best, the run goes on from 3 another way."""
    killed_after(5, config(tmp_path / "run"), monkeypatch)
    assert best_checkpoint_path(tmp_path / "run").is_dir()
    again = config(tmp_path / "run", HARSH, resume=True)
    result = run(again)
    assert result.exported == 3  # that checkpoint was there, and later steps were worse
    assert_exports_what_it_says(again, result)


def test_nor_later_by_a_run_that_kept_none_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed_after(5, config(tmp_path / "run"), monkeypatch)
    run(config(tmp_path / "run", HARSH, resume=True, export="last"))
    last = config(tmp_path / "run", HARSH, resume=True, steps=7)
    assert_exports_what_it_says(last, run(last))


def test_without_metrics_the_best_is_still_known(tmp_path: Path) -> None:
    whole = run(config(tmp_path / "whole", 0.1, save_every=1))
    assert 1 <= whole.exported < 5
    half = config(tmp_path / "half", 0.1, save_every=1, steps=whole.exported + 1)
    run(half)
    (tmp_path / "half" / "metrics.jsonl").unlink()
    result = run(replace(half, steps=6, resume=True))
    assert (result.exported, result.loss_after) == (whole.exported, whole.loss_after)
    assert result.loss_before == whole.loss_before
    left, right = weights(tmp_path / "whole"), weights(tmp_path / "half")
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("steps", [4, 6])
def test_best_may_be_asked_for_of_a_run_that_kept_none(tmp_path: Path, steps: int) -> None:
    """Of its first part the step of the checkpoint alone can be the best, also where nothing is left to do."""
    run(config(tmp_path / "run", HARSH, export="last", steps=4))
    again = config(tmp_path / "run", HARSH, resume=True, steps=steps)
    result = run(again)
    assert result.exported >= 4
    assert_exports_what_it_says(again, result)


def test_a_best_that_was_changed_is_not_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"

    def swap(step: int, loss: float, vocab_size: int) -> None:
        check_loss(step, loss, vocab_size)
        if step == 6:
            third, deadline = run_dir / "checkpoints" / "step-000003", time.monotonic() + 60
            while not third.exists() and time.monotonic() < deadline:  # it is written beside the steps
                time.sleep(0.01)
            shutil.rmtree(best_checkpoint_path(run_dir))
            shutil.copytree(third, best_checkpoint_path(run_dir))

    monkeypatch.setattr(train_module, "check_loss", swap)
    with pytest.raises(ValueError, match=r"checkpoints/best holds step 3.*step 1 is the best.*--resume"):
        run(config(run_dir, HARSH))
    assert not (run_dir / "export").exists()


def write(path: Path, count: int, mark: str = "") -> Path:
    rows = [{"prompt": f"{i}{mark}+1=", "completion": str(i + 1)} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        cli.main(partial(main, argv))
    assert stop.value.code == 2
    return capsys.readouterr().err


CHANGES: list[tuple[Callable[[Path], list[str]], list[str]]] = [
    (lambda folder: ["--batch-size", "8"], ["--batch-size is 8, it was 4"]),
    (lambda folder: ["--data", f"{folder}/a.jsonl:3", f"{folder}/b.jsonl:2"], ["weights", "3, 2", "3, 1"]),
    (lambda folder: [str(write(folder / "a.jsonl", 50))][:0], ["a.jsonl", "rows to train on"]),
    (lambda folder: [str(write(folder / "b.jsonl", 40, "x"))][:0], ["b.jsonl", "other rows"]),
    (lambda folder: ["--eval-share", "0.5"], ["a.jsonl", "rows to train on"]),
    (lambda folder: ["--data", f"{folder}/b.jsonl:3", f"{folder}/a.jsonl:1"], ["a.jsonl", "b.jsonl"]),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_other_rows_than_were_next_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[Path], list[str]], words: list[str]
) -> None:
    files = [f"{write(tmp_path / 'a.jsonl', 40)}:3", f"{write(tmp_path / 'b.jsonl', 40, 'y')}:1"]
    model = save_tiny_model(tmp_path / "model", 0)
    usual = ["--batch-size", "4", "--trainer.device", "cpu", "--run-dir", str(tmp_path / "run")]
    main(["--model", str(model), "--data", *files, "--max-steps", "2", *usual])
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    go_on = ["--resume", "--run-dir", str(tmp_path / "run"), "--max-steps", "3"]
    said = refused([*go_on, *change(tmp_path)], capsys)
    assert all(word in said for word in words), said
    assert "start a new run" in said
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert load_config(SftConfig, tmp_path / "run" / "config.json").batch_size == 4


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


TEARS: list[tuple[str, Callable[[Path], None], str]] = [
    ("__0_0.distcp", flipped, "is damaged"),
    ("__0_0.distcp", cut, "bytes and had"),
    ("random_0.pt", Path.unlink, "is missing"),
    (".metadata", flipped, "is damaged"),
    ("engine.json", cut, "is damaged"),
    ("engine.json", Path.unlink, "it has no engine.json"),
]


@pytest.mark.parametrize(("name", "tear", "words"), TEARS)
def test_a_torn_checkpoint_is_refused_by_the_name_of_its_file(
    torn: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, tear: Callable[[Path], None], words: str
) -> None:
    run_dir = shutil.copytree(torn, tmp_path / "run")
    tear(run_dir / "checkpoints" / "step-000002" / name)
    before = (run_dir / "metrics.jsonl").read_bytes()
    said = refused(["--resume", "--max-steps", "3", "--run-dir", str(run_dir)], capsys)
    assert name in said
    assert words in said
    assert "step-000002" in said
    assert (run_dir / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is to be torn."""
    run_dir = tmp_path_factory.mktemp("torn") / "run"
    run(small(run_dir, steps=2, batch_size=4, save_every=2, eval_rows=4))
    return run_dir
