"""The batch that ended a run is kept, whole: trained on again, it is refused again, and its neighbours are not."""

from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from apps.common.run.nonfinite_batch import DIFFERENCE, NAME, load_batch, save_batch, save_batch_on_nonfinite
from engines import EngineConfig, LocalBatch, LogProbDifferenceError, NonFiniteError, TrainEngine, build_engine
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO, SFT
from seqpack import index_select

LENGTHS = [7, 3, 12, 5]


def engine() -> TrainEngine:
    return build_engine(EngineConfig(device="cpu", max_tokens_per_rank=20), tiny_model(num_hidden_layers=2))


def poisoned() -> TensorDict:
    batch = tiny_batch(LENGTHS)
    batch["advantages"].values()[10:22] = float("nan")  # row 2
    return batch


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    batch = tiny_batch(LENGTHS)
    save_batch(batch, tmp_path / "one")
    read = load_batch(tmp_path / "one")
    assert set(read.keys()) == set(batch.keys())
    for key in batch.keys():  # noqa: SIM118
        for one, other in zip(batch[key].unbind(), read[key].unbind(), strict=True):
            assert torch.equal(one, other), key
            assert one.dtype == other.dtype
    losses = [engine().train_batch(one, SFT())["loss"] for one in (batch, read)]
    assert losses[0] == losses[1]


def test_the_batch_of_a_failed_step_is_kept_and_fails_again(tmp_path: Path) -> None:
    with (
        pytest.raises(NonFiniteError, match=f"step 1: .*The batch is in {tmp_path / NAME}"),
        save_batch_on_nonfinite(tmp_path),
    ):
        engine().train_batch(poisoned(), GRPO())
    read = load_batch(tmp_path / NAME)
    with pytest.raises(NonFiniteError):
        engine().train_batch(read, GRPO())
    engine().train_batch(index_select(read, [0, 1, 3]), GRPO())
    with pytest.raises(NonFiniteError):
        engine().train_batch(index_select(read, [2]), GRPO())


def test_rows_that_a_rank_holds_are_kept_in_a_file_of_its_own(tmp_path: Path) -> None:
    built, batch = engine(), poisoned()
    rows = (2, 0, 1, 3)
    part = LocalBatch(index_select(batch, rows), rows, tuple(LENGTHS), built.row_stats(batch, GRPO()))
    with (
        pytest.raises(NonFiniteError, match=r"The batch is in .*/not-finite-rank-0\.safetensors"),
        save_batch_on_nonfinite(tmp_path),
    ):
        built.train_batch(part, GRPO())
    read = load_batch(tmp_path / "not-finite-rank-0.safetensors")
    assert [row.tolist() for row in read["input_ids"].unbind()] == [batch["input_ids"][row].tolist() for row in rows]


def test_an_error_without_a_batch_passes_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match="of an export"), save_batch_on_nonfinite(tmp_path):
        raise NonFiniteError("of an export")
    assert list(tmp_path.iterdir()) == []


def test_the_batch_of_a_failed_check_is_kept_and_named(tmp_path: Path) -> None:
    config = EngineConfig(device="cpu", recheck_bound=1e-12)
    built, batch = build_engine(config, tiny_model(num_hidden_layers=2)), tiny_batch(LENGTHS)
    with (
        pytest.raises(LogProbDifferenceError, match=f"step 1: .*The batch is in {tmp_path / DIFFERENCE}"),
        save_batch_on_nonfinite(tmp_path),
    ):
        built.train_batch(batch, SFT())
    assert torch.equal(load_batch(tmp_path / DIFFERENCE)["input_ids"].values(), batch["input_ids"].values())
