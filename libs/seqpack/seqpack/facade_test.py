import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import seqpack


def test_no_export_is_hidden_by_a_module_of_the_same_name() -> None:
    # Importing seqpack.name sets the attribute `name` of the package, which would then never reach __getattr__.
    modules = {path.stem for path in Path(seqpack.__file__).parent.iterdir()}
    assert not modules & set(seqpack.__all__)


@pytest.mark.parametrize("name", seqpack.__all__)
def test_every_name_can_be_had_and_is_where_the_facade_says(name: str) -> None:
    value = getattr(seqpack, name)
    assert value is getattr(import_module(seqpack._EXPORTS[name]), name)
    assert name in dir(seqpack)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="module 'seqpack' has no attribute 'nothing'"):
        seqpack.nothing  # noqa: B018


def loaded_after(code: str) -> set[str]:
    return {name.split(".")[0] for name in loaded_modules(code)}


def loaded_modules(code: str) -> set[str]:
    program = f"import sys\n{code}\nprint(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        check=True,
    )
    return set(done.stdout.decode().split())


def test_planning_needs_numpy_alone() -> None:
    assert not loaded_after("import seqpack") & {"torch", "numpy", "tensordict"}
    loaded = loaded_after("from seqpack import SequenceCost, balance, pack, plan_micro_batches; pack([1], 2)")
    assert "numpy" in loaded
    assert not loaded & {"torch", "tensordict", "transformers"}


def test_the_facade_brings_no_pictures_and_no_command_line() -> None:
    # Every target that depends on seqpack would be tested again for a change of a colour.
    done = loaded_modules("import seqpack\nfor name in seqpack.__all__: getattr(seqpack, name)")
    assert not [name for name in done if name.startswith(("seqpack.drawing", "seqpack.__main__", "seqpack.testing"))]


def test_jagged_tensors_need_no_tensordict() -> None:
    code = (
        "import torch, seqpack\nfrom seqpack.batches.batch import jagged\n"
        "seqpack.concat(seqpack.chunk(jagged([torch.zeros(2), torch.ones(3)]), 2))"
    )
    assert "tensordict" not in loaded_after(code)
