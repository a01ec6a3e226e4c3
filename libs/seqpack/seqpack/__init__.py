"""Variable-length batches: plan, pack, unpack and chunk them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpack.algebra import chunk as chunk
    from seqpack.algebra import concat as concat
    from seqpack.algebra import from_padded as from_padded
    from seqpack.algebra import index_select as index_select
    from seqpack.algebra import split as split
    from seqpack.algebra import to_padded as to_padded
    from seqpack.algebra import unbind as unbind
    from seqpack.balancing import BalancePlan as BalancePlan
    from seqpack.balancing import balance as balance
    from seqpack.batch import check_batch as check_batch
    from seqpack.batch import lengths as lengths
    from seqpack.batch import make_batch as make_batch
    from seqpack.costs import SequenceCost as SequenceCost
    from seqpack.geometry import alignment as alignment
    from seqpack.geometry import packed_geometry as packed_geometry
    from seqpack.micro_batches import MicroBatchPlan as MicroBatchPlan
    from seqpack.micro_batches import plan_micro_batches as plan_micro_batches
    from seqpack.packed import PackedBatch as PackedBatch
    from seqpack.packed import pack_each as pack_each
    from seqpack.packed import pack_sequences as pack_sequences
    from seqpack.packed import unpack_sequences as unpack_sequences
    from seqpack.packed import unpack_tokens as unpack_tokens
    from seqpack.packing import PackPlan as PackPlan
    from seqpack.packing import pack as pack

_EXPORTS = {
    "BalancePlan": "seqpack.balancing",
    "MicroBatchPlan": "seqpack.micro_batches",
    "PackPlan": "seqpack.packing",
    "PackedBatch": "seqpack.packed",
    "SequenceCost": "seqpack.costs",
    "alignment": "seqpack.geometry",
    "balance": "seqpack.balancing",
    "check_batch": "seqpack.batch",
    "chunk": "seqpack.algebra",
    "concat": "seqpack.algebra",
    "from_padded": "seqpack.algebra",
    "index_select": "seqpack.algebra",
    "lengths": "seqpack.batch",
    "make_batch": "seqpack.batch",
    "pack": "seqpack.packing",
    "pack_each": "seqpack.packed",
    "pack_sequences": "seqpack.packed",
    "packed_geometry": "seqpack.geometry",
    "plan_micro_batches": "seqpack.micro_batches",
    "split": "seqpack.algebra",
    "to_padded": "seqpack.algebra",
    "unbind": "seqpack.algebra",
    "unpack_sequences": "seqpack.packed",
    "unpack_tokens": "seqpack.packed",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
