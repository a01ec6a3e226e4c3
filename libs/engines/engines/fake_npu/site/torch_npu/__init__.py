"""What tests import as torch_npu: the stand-in. Its folder's parent goes on the path (`engines.fake_npu.path`)."""

from typing import Any

import torch

from engines.fake_npu.face import install
from engines.fake_npu.surface import read_surface

__version__ = read_surface().version
npu = install()


def __getattr__(name: str) -> Any:
    """Return an operator of torch.ops.npu, as the real package exports them."""
    if name in read_surface().operator_names():
        return getattr(torch.ops.npu, name)
    raise AttributeError(f"torch_npu {__version__} has no {name}")
