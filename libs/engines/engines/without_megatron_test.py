"""The library runs where Megatron, its bridges and Transformer Engine are not installed, and says so where asked."""

import os
import subprocess
import sys

import pytest

import engines
from engines import EngineConfig, build_engine
from engines.capability import supports
from engines.launch import ensure_group
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

BLOCKED = ("megatron", "mbridge", "transformer_engine", "apex", "fla")


def without() -> None:
    """In a process that can't import them: every public name, a step, and what a Megatron engine would need."""
    for name in engines.__all__:
        getattr(engines, name)
    ensure_group("cpu")
    built = build_engine(EngineConfig(device="cpu"), tiny_model("moe"))
    assert built.train_batch(tiny_batch([5, 3]), SFT())["loss"] > 0
    assert not supports(EngineConfig(backend="megatron"), "megatron")
    with pytest.raises(ValueError, match=r"megatron-core is not installed: pip install 'tessera-engines\[megatron\]'"):
        build_engine(EngineConfig(backend="megatron", device="cpu"), tiny_model("moe"))
    assert not [name for name in sys.modules if name.startswith(("engines.megatron", "megatron."))]


def test_the_library_trains_without_megatron_and_says_what_to_install_for_it() -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({BLOCKED}))"  # None: an import of it fails
    code = f"{blocked}; from engines.without_megatron_test import without; without(); print('trained')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("trained\n")
