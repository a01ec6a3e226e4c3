"""Private names of other packages stand in one file, `seqpack/private_api.py`."""

from pathlib import Path

from seqpack.testing.private_names import private_names


def test_private_names_of_other_packages_stand_in_one_file() -> None:
    assert private_names(Path(__file__).parent) == []


def test_what_is_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import torch\nfrom torch._dynamo import x\nfrom ray import _y\n"
        "class A:\n    def _own(self): self._mine, self._version = 1, 2\n"
        "a = A()._own, a._mine, a._theirs, torch._check, a._replace(), a.__dict__\n"
        "b = getattr(a, '_own'), getattr(a, '_hidden', None), vars(a)['_kept'], a._version, {'_key': 1}\n"
    )
    (tmp_path / "private_api.py").write_text("import torch\ntorch._kept\n")
    assert sorted(private_names(tmp_path)) == [
        "one.py:2 torch._dynamo.x",
        "one.py:3 ray._y",
        "one.py:6 _check",
        "one.py:6 _theirs",
        "one.py:7 _hidden",
        "one.py:7 _kept",
        "one.py:7 _version",
    ]
