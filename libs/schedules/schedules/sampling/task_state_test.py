"""A run's number, by which its ledgers are told from another's, lasts as long as its records."""

import json
from pathlib import Path

import pytest

from rollout.ledger.ledger import RolloutLedger
from schedules.sampling.ledger_files import SHARED
from schedules.sampling.task_state import NAME, load_cursor, run_number, save_cursor


def test_a_run_keeps_its_number_beside_its_cursors(tmp_path: Path) -> None:
    number = run_number(tmp_path / "run")
    assert number is not None
    for step in range(1, 9):
        save_cursor(tmp_path / "run", step, {"epoch": step}, keep=1)
        assert run_number(tmp_path / "run") == number
        assert load_cursor(tmp_path / "run", step) == {"epoch": step}
    assert run_number(tmp_path / "other") != number


def test_the_ledger_of_a_twin_is_refused(tmp_path: Path) -> None:
    """Two runs of the same steps; the ledger of one is put into the folder of the other."""
    for name in ("mine", "twin"):
        with RolloutLedger(tmp_path / name / SHARED, run=run_number(tmp_path / name)) as ledger:
            ledger.started(0, 0)
            ledger.finished(0, b"episodes")
            ledger.train(1, [0])
            save_cursor(tmp_path / name, 1, {}, keep=2)
            ledger.saved(1)
    mine = run_number(tmp_path / "mine")
    RolloutLedger(tmp_path / "mine" / SHARED, 1, run=mine).close()
    (tmp_path / "twin" / SHARED).replace(tmp_path / "mine" / SHARED)
    with pytest.raises(ValueError, match="was written by another run"):
        RolloutLedger(tmp_path / "mine" / SHARED, 1, run=mine)


def test_a_run_from_before_numbers_goes_on_without_one(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps({"3": {"epoch": 0}}))
    assert run_number(tmp_path) is None
    save_cursor(tmp_path, 4, {"epoch": 1}, keep=2)
    assert load_cursor(tmp_path, 4) == {"epoch": 1}
    (tmp_path / NAME).unlink()
    (tmp_path / SHARED).touch()
    assert run_number(tmp_path) is None
