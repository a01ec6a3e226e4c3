"""A process group of one rank for the tests of a file: import `one_rank`, and each of them has it."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from engines.launch import ensure_group


@pytest.fixture(autouse=True, scope="module")
def one_rank() -> Iterator[None]:
    """Make a gloo group of one rank where there is none, and end it after the file's last test."""
    made = ensure_group("cpu")
    yield
    if made:
        dist.destroy_process_group()
