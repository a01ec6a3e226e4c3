"""What depends on a checkpoint is done when it is whole, in order, and training does not wait for it."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Never

import pytest

from apps.common.run.checkpoint_saver import CheckpointSaver
from apps.common.run.checkpoints import checkpoint_path, last_checkpoint
from apps.common.run.full_disk import FullDiskError
from engines import EngineConfig, build_engine
from engines.storage import checkpoint
from engines.storage.directories import repeat_directory
from engines.storage.manifest import write_manifest
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The disk, which makes no checkpoint whole until it is opened."""
    opened = threading.Event()

    def slow(*args: Any) -> None:
        assert opened.wait(60)
        write_manifest(*args)

    monkeypatch.setattr(checkpoint, "write_manifest", slow)
    yield opened
    opened.set()


class Run:
    def __init__(self, folder: Path, keep: int = 0) -> None:
        config = EngineConfig(device="cpu", lr=1e-2, max_tokens_per_rank=20)
        self.engine: Any = build_engine(config, tiny_model(num_hidden_layers=1))
        self.folder = folder
        self.told: list[tuple[str, int, list[str]]] = []
        self.saves = CheckpointSaver(
            self.engine,
            folder,
            keep,
            lambda step: self.told.append(("saving", step, self.whole())),
            lambda step: self.told.append(("saved", step, self.whole())),
        )

    def whole(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*") if path.suffix != ".writing")

    def step(self) -> int:
        self.engine.train_batch(tiny_batch([7, 3, 5]), SFT())
        self.saves.look()
        step: int = self.engine.step
        return step

    def begin(self, *names: str) -> None:
        step = self.engine.step
        paths = [self.folder / "checkpoints" / name for name in names] or [checkpoint_path(self.folder, step)]
        self.saves.begin(step, paths)

    def broken(self, error: BaseException | type[BaseException] | None) -> None:
        with self.saves:
            self.begin()
            if error is not None:
                raise error


def test_a_step_is_done_meanwhile_and_the_record_waits_for_the_manifest(tmp_path: Path, gate: threading.Event) -> None:
    run = Run(tmp_path)
    with run.saves:
        run.step()
        run.begin()
        assert run.step() == 2
        assert run.told == [("saving", 1, [])]
        assert last_checkpoint(tmp_path) is None
        gate.set()
        run.begin()  # waits for the first, and tells of it before it begins
        assert run.told[1:] == [("saved", 1, ["step-000001"]), ("saving", 2, ["step-000001"])]
    assert run.told[3:] == [("saved", 2, ["step-000001", "step-000002"])]
    assert run.whole() == ["step-000002"]  # the old one went after the new one was whole


def test_the_best_is_there_before_the_checkpoint_counts(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    seen: list[list[str]] = []

    def noted(source: Path, target: Path) -> None:
        seen.append(run.whole())
        repeat_directory(source, target)

    monkeypatch.setattr(checkpoint, "repeat_directory", noted)
    gate.set()
    with run.saves:
        run.step()
        run.begin("best", "step-000001")
        run.step()
        run.begin("step-000002")
    assert seen == [["best"]]
    assert run.whole() == ["best", "step-000002"]
    other = Run(tmp_path)
    other.engine.load(tmp_path / "checkpoints" / "best")
    assert other.engine.step == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_run_that_ends_with_an_error_leaves_its_last_checkpoint_whole(
    tmp_path: Path, gate: threading.Event, error: type[BaseException]
) -> None:
    run = Run(tmp_path)
    threading.Timer(0.2, gate.set).start()
    with pytest.raises(error):
        run.broken(error)
    assert run.whole() == ["step-000000"]
    assert run.told == [("saving", 0, [])]  # its record comes with the next start


def test_a_full_disk_is_told_beside_what_ended_the_run_or_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Never:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "write_manifest", full)
    run = Run(tmp_path)
    with pytest.raises(FullDiskError, match=f"no space is left on the disk of {tmp_path}: the checkpoint of step 0"):
        run.broken(None)
    with pytest.raises(ValueError, match="other") as caught:
        run.broken(ValueError("other"))
    assert "No space" in caught.value.__notes__[0]
    assert [kind for kind, *_ in run.told] == ["saving", "saving"]
