"""The folder of vLLM's files: sockets with names of its length can be bound in it, wherever temporary files lie."""

import shutil
import socket
import tempfile
import uuid
from pathlib import Path

import pytest

from rollout.vllm.server.serve import scratch_folder


@pytest.mark.parametrize("length", [20, 48, 49, 50, 80, 120])
def test_sockets_of_vllm_can_be_bound(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(tempfile.mkdtemp(dir="/tmp"))
    base = root / ("x" * (length - len(str(root)) - 1)) if length > len(str(root)) + 1 else root
    base.mkdir(exist_ok=True)
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    folder = scratch_folder()
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(f"{folder}/{uuid.uuid4()}")
    assert (Path(folder).parent == base) == (len(str(base)) <= 48)
    shutil.rmtree(folder)
    shutil.rmtree(root)
