import os
import subprocess
import sys

import pytest

from apps.common.ranks import from_rank_0, gather_lists, rank_and_world, ranks_of_node


def test_torchrun_says_how_many_ranks_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ranks_of_node(3, 2) == 3
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "8"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    assert ranks_of_node(1, 1) == 8
    assert ranks_of_node(1, 2) == 4
    with pytest.raises(ValueError, match=r"8 ranks, which 3 nodes.*--cluster\.pools\.nodes"):
        ranks_of_node(1, 3)


def test_without_a_group_there_is_one_rank() -> None:
    assert rank_and_world() == (0, 1)
    assert gather_lists([1, 2]) == [1, 2]
    assert from_rank_0("x") == "x"


FAULTS = """
import resource, torch
from apps.common.ranks import keep_freed_memory
def faults(count=20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in range(1, count + 1):
        blocks = [torch.ones(size << 18) for _ in range(3)]  # of up to 20 MiB
        del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
usual = faults()
kept = keep_freed_memory()
faults()
print(usual, faults(), kept)
"""


@pytest.mark.parametrize("own", [False, True])
def test_freed_memory_is_kept_for_the_next_step(own: bool) -> None:
    """Pages that the kernel clears again are counted; the environment's own word stands."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    if own:
        environment["MALLOC_TRIM_THRESHOLD_"] = "100000"
    run = subprocess.run([sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True)
    usual, later, kept = run.stdout.split()
    assert kept == str(not own)
    assert int(usual) > 10_000
    assert (int(later) < int(usual) / 20) is not own
