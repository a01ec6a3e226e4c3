"""`engines.testing.one_rank` where engines are Megatron's: its process groups end with the file's last test too."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from engines.launch import ensure_group
from engines.megatron.runtime import process_groups as groups


def _rank(device: str) -> Iterator[None]:
    made = ensure_group(device)
    yield
    groups.release()
    if made:
        dist.destroy_process_group()


@pytest.fixture(autouse=True, scope="module")
def one_megatron_rank() -> Iterator[None]:
    """Make a gloo group of one rank where there is none."""
    yield from _rank("cpu")


@pytest.fixture(autouse=True, scope="module")
def one_megatron_gpu() -> Iterator[None]:
    """Make an NCCL group of one rank where there is none."""
    yield from _rank("cuda")
