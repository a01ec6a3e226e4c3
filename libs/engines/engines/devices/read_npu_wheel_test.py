"""What is read out of a wheel, on one of a few lines; what was read of torch_npu's own agrees with itself."""

from pathlib import Path
from zipfile import ZipFile

import pytest

from engines.fake_npu import surface
from engines.testing.read_npu_wheel import LIBRARY, OPERATORS, read_surface

INIT = """
import os
from torch_npu.npu.streams import Stream, Event as NpuEvent
from .memory import *
from . import late

__all__ = ["Stream", "NpuEvent", "empty_cache", "wait", "version", "device"]
version = os.environ.get("V")
if version:
    from .late import wait
else:
    def hidden(): ...
class device:
    def __init__(self, index: int): ...
"""
STREAMS = """
class Stream:
    def __new__(cls, device=None, *, priority: int=0): ...
    def __init__(self, other): ...
class Event:
    "No initializer."
"""
SCHEMAS = """
backend: NPU
official:
- func: relu(Tensor self) -> Tensor
custom:
- func: npu_rms_norm(Tensor self, float epsilon=1e-06) -> (Tensor, Tensor)
  op_api: all_version
- func: npu_conv2d.bias(Tensor input, int[2] stride) -> Tensor
- func: npu_conv2d(Tensor input) -> Tensor
- func: npu_bmmV2(Tensor self) -> Tensor
- func: npu_silu_(Tensor(a!) self) -> Tensor(a!)
- func: _npu_dropout(Tensor self, float p) -> (Tensor, Tensor)
- func: npu_diou(Tensor self) -> Tensor
- func: npu_grouped_matmul(Tensor[] x) -> Tensor[]
"""
NODES = ("NpuRmsNorm", "NpuConv2D", "NpuBmmv2", "NpuSilu", "NpuDropout", "NpuGone")
FILES = {
    "torch_npu/__init__.py": "raise RuntimeError('imported')",
    "torch_npu/npu/__init__.py": INIT,
    "torch_npu/npu/streams.py": STREAMS,
    "torch_npu/npu/memory.py": "def empty_cache() -> None: ...\ndef other(): ...",
    "torch_npu/npu/late.py": "def wait(stream, seconds=1.5): ...",
    OPERATORS: SCHEMAS,
}


def mangled(name: str) -> bytes:
    """As a compiler names a class of `at_npu::autograd::generated`."""
    return f"_ZTIN6at_npu8autograd9generated{len(name)}{name}E".encode()


def wheel(folder: Path, **changes: str) -> Path:
    """Names in the library besides: a string that ends like a node, a node of torch's own, one of another class."""
    others = [b"CrossEntropyLNpuDiouBackward0", b"_ZN5torch8autograd9generated24NpuGroupedMatmulBackward0E"]
    others.append(mangled("NpuGroupedMatmulBackward0_details"))
    library = b"\x00".join([*(mangled(f"{name}Backward0") for name in NODES), *others])
    path = folder / "torch_npu-9.8.7-cp311-cp311-manylinux_2_28_x86_64.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr(LIBRARY, library)
        for name, text in {**FILES, **changes}.items():
            archive.writestr(name, text)
    return path


def test_names_are_read_without_importing(tmp_path: Path) -> None:
    surface = read_surface(wheel(tmp_path))
    schemas = [line.removeprefix("- func: ") for line in SCHEMAS.partition("custom:")[2].splitlines() if "func" in line]
    assert surface == {
        "version": "9.8.7",
        "functions": {"empty_cache": "", "wait": "stream, seconds=1.5"},
        "classes": {"Stream": "device=None, *, priority: int=0", "NpuEvent": None, "device": "index: int"},
        "variables": ["version"],
        "operators": sorted(schemas),
        "differentiable": ["_npu_dropout", "npu_bmmV2", "npu_conv2d", "npu_rms_norm", "npu_silu_"],
    }


def test_a_wheel_without_public_names_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch_npu\.npu has no __all__ in this wheel"):
        read_surface(wheel(tmp_path, **{"torch_npu/npu/__init__.py": "def f(): ..."}))


def test_what_autograd_knows_are_operators() -> None:
    """Of the surface that is committed; the names whose nodes are spelled otherwise are among them."""
    committed = surface.read_surface()
    assert set(committed.differentiable) <= committed.operator_names()
    assert {"npu_bmmV2", "npu_deformable_conv2d", "npu_masked_causal_conv1d"} <= set(committed.differentiable)
    assert (committed.operators, committed.differentiable) == (
        sorted(committed.operators),
        sorted(committed.differentiable),
    )
    assert len(committed.differentiable) == 71
