"""`python -m runlog`: the report at any time."""

import subprocess
import sys
from pathlib import Path

import pytest

from runlog.__main__ import main
from runlog.run import RunLog


def test_a_report_while_the_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLog(tmp_path / "run", tensorboard=False) as log:
        log.metrics(1, {"reward": 0.5})
        assert main([str(tmp_path / "run")]) == 0
        log.metrics(2, {"reward": 0.7})
        with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "rew')
        assert main([str(tmp_path / "run"), "--max-bytes", "200000"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "run" / "report.html")] * 2


def test_a_folder_without_a_run_is_refused_and_the_others_are_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLog(tmp_path / "run", tensorboard=False) as log:
        log.metrics(1, {"reward": 0.5})
    assert main([str(tmp_path / "none"), str(tmp_path / "run")]) == 2
    assert "none" in capsys.readouterr().err
    assert (tmp_path / "run" / "report.html").is_file()


def test_it_is_a_command(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.metrics(1, {"reward": 0.5})
    done = subprocess.run([sys.executable, "-m", "runlog", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "report.html")), done.stderr


def test_compare_writes_a_page_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        with RunLog(tmp_path / name, tensorboard=False) as log:
            log.metrics(1, {"reward": 0.5})
    page = tmp_path / "page.html"
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    assert main(["compare", str(tmp_path / "a")]) == main(["serve", str(tmp_path / "none")]) == 2
    assert "error: compare takes two to 8" in capsys.readouterr().err
