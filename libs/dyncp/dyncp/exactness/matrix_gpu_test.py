"""The exactness matrix in bfloat16 on the GPUs of this machine; the bounds stand in benchmarks/matrix_gpu.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "matrix_gpu.py"


def run_on(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, found {torch.cuda.device_count()}")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", str(SCRIPT)]
    done = subprocess.run(command, check=False, timeout=580, capture_output=True, text=True)
    print(done.stdout)  # the table, for pytest -rP
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "| hybrid | contiguous | ulysses |" in done.stdout


@pytest.mark.gpu
def test_one_gpu() -> None:
    run_on(1)


@pytest.mark.gpu4
def test_two_gpus() -> None:
    run_on(2)


@pytest.mark.gpu4
def test_four_gpus() -> None:
    run_on(4)
