"""Private names of torch that runplan uses, in its tests alone: what a new version may break is here."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves


def address(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage's own structure, also of one without data."""
    key: int = storage._cdata
    return key
