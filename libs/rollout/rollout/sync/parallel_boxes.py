"""The boxes of a checkpoint's tensors that a tensor-parallel worker of vLLM computes with.

Column-parallel layers have rows of their matrix on each worker, row-parallel ones columns, the vocabulary rows of a
padded matrix (Megatron-LM, arXiv 1909.08053, as in vLLM's `linear` and `vocab_parallel_embedding`). Keys and values
have at least one head on each worker: heads have several copies where workers are more. Experts are split like an MLP,
or in runs of whole experts (expert parallelism). What no rule names a worker takes whole, which is always right.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.sync.boxes import Box

VOCABULARY_PADDING = 64
"""vLLM's vocabulary is padded to a multiple of it."""
_COLUMN = re.compile(r"\b(q_proj|gate_proj|up_proj|in_proj_z|in_proj_b|in_proj_a)\.(weight|bias)$|\.(A_log|dt_bias)$")
_ROW = re.compile(r"\b(o_proj|down_proj|out_proj)\.weight$")
_KEY_VALUE = re.compile(r"\b[kv]_proj\.(weight|bias)$")
_MIXED = re.compile(r"\.(in_proj_qkv|conv1d)\.(weight|bias)$")
_VOCABULARY = re.compile(r"(^|\.)(embed_tokens|lm_head)\.weight$")
_ONE_EXPERT = re.compile(r"\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_ALL_EXPERTS = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")


@dataclass(frozen=True)
class WorkerLayout:
    """How vLLM splits a model over the workers of one copy, and the sizes that decide it.

    `key_width`, `value_width`: rows of the keys (queries as many) and values of a gated delta net. `experts_apart`:
    whether a worker has whole experts (vLLM's `enable_expert_parallel`).
    """

    workers: int
    kv_heads: int
    key_width: int = 0
    value_width: int = 0
    experts: int = 0
    experts_apart: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1 or self.kv_heads < 1:
            raise ValueError(f"a layout has workers and heads of keys, got {self.workers} and {self.kv_heads}")
        many, few = max(self.workers, self.kv_heads), min(self.workers, self.kv_heads)
        if many % few:
            raise ValueError(f"{self.workers} workers and {self.kv_heads} heads of keys: one must divide the other")

    @staticmethod
    def of(config: Any, workers: int, experts_apart: bool = False) -> "WorkerLayout":
        """Read the sizes off a text config of transformers."""
        keys = getattr(config, "linear_num_key_heads", 0) * getattr(config, "linear_key_head_dim", 0)
        values = getattr(config, "linear_num_value_heads", 0) * getattr(config, "linear_value_head_dim", 0)
        experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0
        return WorkerLayout(workers, config.num_key_value_heads, keys, values, experts, experts_apart)


def worker_boxes(name: str, shape: Sequence[int], layout: WorkerLayout, rank: int) -> list[Box]:
    """Return the boxes of a tensor, by its name on disk, that worker number `rank` has.

    Raises:
        ValueError: the workers cannot split it evenly.
    """
    whole = Box.whole(shape)
    if layout.workers == 1:
        return [whole]
    if (one := _ONE_EXPERT.search(name)) and layout.experts_apart:
        first, count = expert_run(layout, rank)
        return [whole] if first <= int(one[1]) < first + count else []
    if every := _ALL_EXPERTS.search(name):
        return _expert_boxes(name, every[1], shape, layout, rank)
    if _VOCABULARY.search(name):
        each = -(-shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING // layout.workers
        first = min(rank * each, shape[0])
        return [_rows(whole, 0, first, min(first + each, shape[0]) - first)]
    if _KEY_VALUE.search(name):
        parts = min(layout.workers, layout.kv_heads)
        return [_part(name, whole, 0, parts, rank * parts // layout.workers)]
    if _MIXED.search(name):
        runs = ((0, layout.key_width), (layout.key_width, layout.key_width), (2 * layout.key_width, layout.value_width))
        return [_part(name, _rows(whole, 0, first, size), 0, layout.workers, rank) for first, size in runs]
    if _ROW.search(name):
        return [_part(name, whole, 1, layout.workers, rank)]
    if _COLUMN.search(name):
        return [_part(name, whole, 0, layout.workers, rank)]
    return [whole]


def expert_run(layout: WorkerLayout, rank: int) -> tuple[int, int]:
    """Return the first of a worker's own experts and their number: runs in order, the first workers' one longer."""
    each, more = divmod(layout.experts, layout.workers)
    return rank * each + min(rank, more), each + (rank < more)


def _expert_boxes(name: str, kind: str, shape: Sequence[int], layout: WorkerLayout, rank: int) -> list[Box]:
    """Return the boxes of a tensor of all experts: [E, 2 I, H] with gate above up, or [E, H, I]."""
    whole = Box.whole(shape)
    if layout.experts_apart:
        return [_rows(whole, 0, *expert_run(layout, rank))]
    if kind == "down_proj":
        return [_part(name, whole, 2, layout.workers, rank)]
    half = shape[1] // 2
    return [_part(name, _rows(whole, 1, at, half), 1, layout.workers, rank) for at in (0, half)]


def _part(name: str, box: Box, dimension: int, parts: int, number: int) -> Box:
    size, rest = divmod(box.size[dimension], parts)
    if rest:
        raise ValueError(f"{name}: {box.size[dimension]} of dimension {dimension} do not split over {parts} workers")
    return _rows(box, dimension, number * size, size)


def _rows(box: Box, dimension: int, first: int, count: int) -> Box:
    start, size = list(box.start), list(box.size)
    start[dimension] += first
    size[dimension] = count
    return Box(tuple(start), tuple(size))
