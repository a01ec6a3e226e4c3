"""Device npu of a shrunk run on a machine without torch_npu: the stand-in that computes on the CPU (docs/ascend.md)."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path, is_fake
from runplan.run_spec import RunSpec

MESSAGE = "Device npu: torch_npu is not installed here, so its stand-in computes, on the CPU (docs/ascend.md)."


def with_fake_npu(spec: RunSpec) -> RunSpec:
    """Return the spec of a shrunk run, for which the stand-in computes on device npu where torch_npu is missing."""
    return replace(spec, fake_device=find_spec("torch_npu") is None or is_fake())


@contextmanager
def fake_npu_for(device: str) -> Iterator[None]:
    """Let `import torch_npu` give the stand-in inside, and print so, where `device` is npu and torch_npu is missing.

    Raises:
        ValueError: the stand-in cannot be built here.
    """
    if device != "npu" or find_spec("torch_npu") is not None:
        yield
        return
    if reason := reason_against():
        raise ValueError(
            f"device npu: torch_npu is not installed, and its stand-in is built from source: {reason}; or leave the "
            "device out by --trainer.device cpu"
        )
    sys.stdout.write(MESSAGE + "\n")
    sys.stdout.flush()
    with fake_npu_on_path():
        yield
