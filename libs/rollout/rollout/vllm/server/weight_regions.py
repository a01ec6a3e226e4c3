"""A worker's view of weights: a file in host memory, or memory of its own accelerator that the trainer wrote."""

import json
import os

import torch
from torch import Tensor
from vllm.platforms import current_platform

from rollout.vllm.weights import cuda_memory
from rollout.vllm.weights.parts import ReadBytes

REGIONS = "TESSERA_VLLM_REGIONS"
"""Variable of a worker with the paths of its machine's two regions, where a call that goes to several names them by
their numbers."""


class WeightRegions:
    """The regions that were read, each opened once: to map a file anew costs a page fault for each of its pages."""

    def __init__(self) -> None:
        self._opened: dict[str, Tensor] = {}
        self._readers: dict[str, ReadBytes] = {}
        self._copied = False

    def read(self, path: str | int, nbytes: int) -> Tensor:
        """Return `u8[nbytes]` at a path, or of this machine's region of a number; copied to a CUDA device with enough
        free memory, so that the bytes cross the link once and are checked there."""
        if isinstance(path, int):
            path = str(json.loads(os.environ[REGIONS])[path])
        if path not in self._opened:
            self._opened[path] = _open(path, nbytes)
        region = self._opened[path]
        if region.is_cuda or not current_platform.is_cuda() or torch.cuda.mem_get_info()[0] < 2 * nbytes:
            return region
        self._copied = True
        return region.to("cuda", non_blocking=True)

    def reader(self, path: str) -> ReadBytes:
        """Return what reads another process's region on an accelerator of this host; each is opened once."""
        if path not in self._readers:
            self._readers[path] = cuda_memory.reader(path)
        return self._readers[path]

    def forget_copies(self) -> None:
        """Free the memory of copies, which is not vLLM's own."""
        if self._copied:
            self._copied = False
            torch.cuda.empty_cache()


def _open(path: str, nbytes: int) -> Tensor:
    if path.startswith(cuda_memory.PREFIX):
        return cuda_memory.opened(path, nbytes)
    file = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    if current_platform.is_cuda():
        cuda_memory.pin_if_allowed(file)
    return file
