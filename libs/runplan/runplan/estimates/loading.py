"""Memory of a rank while the models of the recipes are read, by arithmetic: `--loading`.

`engines.weights.loading_memory` counts the same on the real modules, and a test measures it on 1, 2 and 4 ranks.
"""

from collections.abc import Iterable, Sequence

from runplan.model.model_shape import ModelShape, count_parameters

GIB = 2**30
DISK_BYTES = 2
"""Bytes of a number on disk: bfloat16."""
RANKS = (1, 8, 16, 32, 64)


def share_bytes(shape: ModelShape, ranks: int, master_bytes: int = 4) -> float:
    """Return the bytes of a rank's rows of every weight."""
    return count_parameters(shape).total * master_bytes / ranks


def largest_bytes(shape: ModelShape, ranks: int) -> float:
    """Return the bytes of a rank's rows of the largest tensor on disk: the embedding, or a layer's experts in one."""
    experts = 2 * shape.experts * shape.expert_intermediate * shape.hidden
    return max(shape.vocab * shape.hidden, experts) * DISK_BYTES / ranks


def loading_table(shapes: Iterable[ModelShape], ranks: Sequence[int] = RANKS) -> str:
    """Return a Markdown table of models, each once, in GiB: share + largest tensor, by number of ranks."""
    cells = [("model", "billions", "in float32, whole", *(f"{n} ranks" for n in ranks))]
    cells.append(tuple("---" for _ in cells[0]))
    for name, shape in sorted({shape.name: shape for shape in shapes}.items()):
        each = (f"{share_bytes(shape, n) / GIB:.1f} + {largest_bytes(shape, n) / GIB:.2f}" for n in ranks)
        total = count_parameters(shape).total
        cells.append((name, f"{total / 1e9:.1f}", f"{total * 4 / GIB:.0f}", *each))
    head = "GiB that a rank holds while weights are read (FSDP2): its share, on its device, + a tensor, on the host"
    return "\n".join([head, "", *("| " + " | ".join(row) + " |" for row in cells)])
