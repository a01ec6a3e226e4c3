"""Private names of other packages stand in one file, `engines/private_api.py`."""

from pathlib import Path

from seqpack.testing.private_names import private_names

KEPT = frozenset(
    [
        "megatron/external_mappings/mbridge.py",
        "megatron/runtime/cuda_calls.py",
        "testing/npu/build.py",
        "testing/npu/face.py",
        "testing/pipeline_executor.py",
    ]
)
"""Files that may: classes that the package asks to derive, adaptations for the versions they name, what tests use."""


def test_private_names_of_other_packages_stand_in_one_file() -> None:
    found = private_names(Path(__file__).parent)
    assert [name for name in found if name.partition(":")[0] not in KEPT] == []
