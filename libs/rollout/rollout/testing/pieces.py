"""Weight pieces of given tensors, as a training engine exports them."""

from collections.abc import Iterable, Iterator

from torch import Tensor

from rollout.sync.pieces import BucketPiece


def pieces_of(tensors: Iterable[tuple[str, Tensor]], max_elements: int | None = None) -> Iterator[BucketPiece]:
    """Cut named tensors into pieces of at most `max_elements` elements (None: one piece a tensor)."""
    if max_elements is not None and max_elements < 1:
        raise ValueError(f"max_elements must be at least 1, got {max_elements}")
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        size = max_elements or max(flat.numel(), 1)
        for offset in range(0, max(flat.numel(), 1), size):
            yield BucketPiece(name, tuple(tensor.shape), tensor.dtype, offset, flat[offset : offset + size])
