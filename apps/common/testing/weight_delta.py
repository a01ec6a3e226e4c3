"""Did training reach every weight? What a run exported is held against what its training began with: for tests."""

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from apps.common.run.config_file import CONFIG_NAME


def tensors_of(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a Hugging Face directory's safetensors files, by name, in float32.

    Raises:
        AssertionError: it holds none.
    """
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert found, f"no weights in {directory}"
    return found


def start_of(run_dir: Path) -> Path:
    """Return the directory of the weights that a run's training began with: its warm start's, `--model`, or those it
    made."""
    warm = run_dir / "warm-start" / "export"
    if warm.is_dir():
        return warm
    model = json.loads((run_dir / CONFIG_NAME).read_text(encoding="utf-8")).get("model")
    return Path(model) if model else run_dir / "model"


def assert_trained(run_dir: Path, start: Path | None = None, only: str = "") -> None:
    """Every tensor of a run's export has moved away from where its training began.

    `start`: the directory to compare with, `start_of(run_dir)` unless given. `only`: a regular expression; the names it
    matches must have moved, and all others must not have.

    Raises:
        AssertionError: naming the tensors that stood still, moved though frozen, hold no number, came or went.
    """
    start = start or start_of(run_dir)
    before, after = tensors_of(start), tensors_of(run_dir / "export")
    assert before.keys() == after.keys(), f"tensors came or went: {sorted(before.keys() ^ after.keys())}"
    broken = [name for name, value in after.items() if not value.isfinite().all()]
    assert not broken, f"no numbers: {broken}"
    trained = {name for name in after if re.search(only, name)}
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert trained, f"no tensor is called {only}"
    assert trained <= moved, f"{len(trained - moved)} of {len(trained)} did not move: {sorted(trained - moved)}"
    assert moved <= trained, f"moved though they are not trained: {sorted(moved - trained)}"
