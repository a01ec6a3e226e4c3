"""Private names of other packages stand in one file, `seqpack/private_api.py`."""

from pathlib import Path

from seqpack.testing.private_names import private_names

KEPT = frozenset(
    [
        "testing/jagged_properties.py",
    ]
)
"""Files that may: what a test makes wrong."""


def test_private_names_of_other_packages_stand_in_one_file() -> None:
    found = private_names(Path(__file__).parent)
    assert [name for name in found if name.partition(":")[0] not in KEPT] == []


def test_what_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import torch\nfrom torch._dynamo import x\nfrom transformers import _y\n"
        "class A:\n    def _own(self): self._mine = 1\n"
        "a = A()._own, a._mine, a._theirs, torch._check, a._replace(), a.__dict__\n"
    )
    (tmp_path / "private_api.py").write_text("import torch\ntorch._kept\n")
    assert sorted(private_names(tmp_path)) == [
        "one.py:2 torch._dynamo.x",
        "one.py:3 transformers._y",
        "one.py:6 _check",
        "one.py:6 _theirs",
    ]
