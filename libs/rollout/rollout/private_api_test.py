"""Private names of other packages stand in one file, `rollout/private_api.py`."""

from pathlib import Path

from seqpack.testing.private_names import private_names

KEPT = frozenset(["tools/sandbox/run.py"])
"""Files that may: of the standard library, in a process that imports nothing else."""


def test_private_names_of_other_packages_stand_in_one_file() -> None:
    found = private_names(Path(__file__).parent)
    assert [name for name in found if name.partition(":")[0] not in KEPT] == []
