"""Private names of other packages stand in one file, `runplan/private_api.py`."""

from pathlib import Path

from seqpack.testing.private_names import private_names


def test_private_names_of_other_packages_stand_in_one_file() -> None:
    assert private_names(Path(__file__).parent) == []
