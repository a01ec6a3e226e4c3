"""A run that trains the head for multi-token prediction: it is in the metrics and the export."""

from dataclasses import replace
from pathlib import Path

import pytest

from apps.grpo.main import run
from apps.grpo.testing.headed import assert_head_trained, small
from runlog import read_metrics


def test_a_run_trains_the_head(tmp_path: Path) -> None:
    """An untrained model is right about nothing: its head learns from what it samples all the same."""
    run(small(tmp_path, "native"))
    assert_head_trained(tmp_path)


def test_megatron_takes_the_same_steps(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    found = []
    for backend in ("fsdp2", "megatron"):
        run(small(tmp_path / backend, "native", backend=backend))
        found.append([row for row in read_metrics(tmp_path / backend / "run") if "train/mtp_loss" in row])
    for one, other in zip(*found, strict=True):
        assert other["train/mtp_loss"] == pytest.approx(one["train/mtp_loss"], rel=1e-3)


def test_a_model_without_the_head_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    config = replace(small(tmp_path, "native"), model=None)
    with pytest.raises(ValueError, match="mtp_num_hidden_layers is None"):
        run(config)
