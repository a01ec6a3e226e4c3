from pathlib import Path

from apps.common.run.checkpoints import checkpoint_path, delete_old_checkpoints, last_checkpoint


def make(run_dir: Path, *steps: int) -> None:
    for step in steps:
        checkpoint_path(run_dir, step).mkdir(parents=True)
        (checkpoint_path(run_dir, step) / "data").write_text("x")


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_last_one_is_the_highest_whole_one(tmp_path: Path) -> None:
    assert last_checkpoint(tmp_path) is None
    make(tmp_path, 2, 10, 9)
    (tmp_path / "checkpoints" / "step-000011.writing").mkdir()
    (tmp_path / "checkpoints" / "step-000012").write_text("a file")
    assert last_checkpoint(tmp_path) == (10, checkpoint_path(tmp_path, 10))


def test_the_last_and_so_many_before_it_are_kept(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4)
    assert delete_old_checkpoints(tmp_path, 3) == []
    assert delete_old_checkpoints(tmp_path, 1) == [checkpoint_path(tmp_path, 1), checkpoint_path(tmp_path, 2)]
    assert names(tmp_path) == ["step-000003", "step-000004"]
    delete_old_checkpoints(tmp_path, 0)
    assert names(tmp_path) == ["step-000004"]
    assert delete_old_checkpoints(tmp_path, 0) == []


def test_what_a_kill_left_half_deleted_goes(tmp_path: Path) -> None:
    make(tmp_path, 1, 2)
    checkpoint_path(tmp_path, 1).rename(tmp_path / "checkpoints" / "step-000001.deleted")
    delete_old_checkpoints(tmp_path, 5)
    assert names(tmp_path) == ["step-000002"]
