"""Weights that stood still are named, whatever else moved."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from apps.common.run.config_file import CONFIG_NAME
from apps.common.run.moved_weights import starting_weights
from apps.common.testing.weight_delta import assert_trained

START = {"a.weight": torch.zeros(2, 3), "b.bias": torch.ones(4)}


def write(folder: Path, **changes: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(START | changes, folder / "model.safetensors")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / CONFIG_NAME).write_text(json.dumps({"model": None}))
    write(tmp_path / "model")
    return tmp_path


MOVED = {name: value + 1e-7 for name, value in START.items()}


@pytest.mark.parametrize(
    ("export", "only", "text"),
    [
        (START, "", r"2 of 2 did not move: \['a.weight', 'b.bias'\]"),
        (MOVED | {"b.bias": START["b.bias"]}, "", r"1 of 2 did not move: \['b.bias'\]"),
        (MOVED, "^a", r"moved though they are not trained: \['b.bias'\]"),
        (MOVED, "^c", "no tensor is called"),
        (MOVED | {"b.bias": torch.full((4,), torch.nan)}, "", r"no numbers: \['b.bias'\]"),
        (MOVED | {"c": torch.ones(1)}, "", r"came or went: \['c'\]"),
    ],
)
def test_what_is_wrong_is_named(run_dir: Path, export: dict[str, torch.Tensor], only: str, text: str) -> None:
    write(run_dir / "export", **export)
    with pytest.raises(AssertionError, match=text):
        assert_trained(run_dir, only=only)


def test_all_or_some_have_moved(run_dir: Path) -> None:
    write(run_dir / "export", **MOVED)
    assert_trained(run_dir)
    write(run_dir / "export", **{"a.weight": MOVED["a.weight"]})
    assert_trained(run_dir, only="weight")


def test_training_begins_after_the_warm_start_and_with_the_users_model(run_dir: Path, tmp_path: Path) -> None:
    """A model that only its warm start trained is none that the run has trained."""
    assert starting_weights(run_dir) == run_dir / "model"
    (run_dir / CONFIG_NAME).write_text(json.dumps({"model": str(tmp_path / "mine")}))
    assert starting_weights(run_dir) == tmp_path / "mine"
    write(run_dir / "warm-start" / "export", **MOVED)
    write(run_dir / "export", **MOVED)
    with pytest.raises(AssertionError, match="2 of 2 did not move"):
        assert_trained(run_dir)
    with pytest.raises(AssertionError, match="no weights in"):
        assert_trained(run_dir, run_dir / "nowhere")
