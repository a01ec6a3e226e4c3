"""Comparison of a run's export with its weights before training: did training reach every weight?"""

import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from apps.common.run.moved_weights import starting_weights


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Return all tensors of a Hugging Face directory's safetensors files, by name, in float32.

    Raises:
        AssertionError: it holds none.
    """
    tensors: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors |= {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert tensors, f"no weights in {directory}"
    return tensors


def assert_trained(run_dir: Path, start: Path | None = None, only: str = "") -> None:
    """Assert that every tensor of a run's export differs from its value before training.

    `start`: the directory to compare with, by default `starting_weights(run_dir)`. `only`: a regular expression; the
    names it matches must have changed, and no others.

    Raises:
        AssertionError: naming the tensors that did not change, changed though frozen, are not finite, came or went.
    """
    start = start or starting_weights(run_dir)
    before, after = load_tensors(start), load_tensors(run_dir / "export")
    assert before.keys() == after.keys(), f"tensors came or went: {sorted(before.keys() ^ after.keys())}"
    broken = [name for name, value in after.items() if not value.isfinite().all()]
    assert not broken, f"no numbers: {broken}"
    trained = {name for name in after if re.search(only, name)}
    moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert trained, f"no tensor is called {only}"
    assert trained <= moved, f"{len(trained - moved)} of {len(trained)} did not move: {sorted(trained - moved)}"
    assert moved <= trained, f"moved though they are not trained: {sorted(moved - trained)}"
