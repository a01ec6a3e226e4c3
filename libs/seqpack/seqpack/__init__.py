"""Variable-length batches: plan, pack, unpack and chunk them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from seqpack.batches.batch import check_batch as check_batch
    from seqpack.batches.batch import lengths as lengths
    from seqpack.batches.batch import make_batch as make_batch
    from seqpack.batches.batch import view_batch as view_batch
    from seqpack.batches.dicts import share_offsets as share_offsets
    from seqpack.batches.objective import Objective as Objective
    from seqpack.batches.operations import chunk as chunk
    from seqpack.batches.operations import concat as concat
    from seqpack.batches.operations import from_padded as from_padded
    from seqpack.batches.operations import index_select as index_select
    from seqpack.batches.operations import split as split
    from seqpack.batches.operations import to_padded as to_padded
    from seqpack.batches.operations import unbind as unbind
    from seqpack.batches.packed import PackedBatch as PackedBatch
    from seqpack.batches.packed import pack_each as pack_each
    from seqpack.batches.packed import pack_sequences as pack_sequences
    from seqpack.batches.packed import unpack_sequences as unpack_sequences
    from seqpack.batches.packed import unpack_tokens as unpack_tokens
    from seqpack.batches.view import BatchView as BatchView
    from seqpack.batches.view import Totals as Totals
    from seqpack.capability import No as No
    from seqpack.capability import Supported as Supported
    from seqpack.capability import Unsupported as Unsupported
    from seqpack.capability import Yes as Yes
    from seqpack.planning.balancing import BalancePlan as BalancePlan
    from seqpack.planning.balancing import balance as balance
    from seqpack.planning.costs import SequenceCost as SequenceCost
    from seqpack.planning.family_flops import model_flops as model_flops
    from seqpack.planning.flops import LayerFlops as LayerFlops
    from seqpack.planning.flops import ModelFlops as ModelFlops
    from seqpack.planning.micro_batches import MicroBatchPlan as MicroBatchPlan
    from seqpack.planning.micro_batches import plan_micro_batches as plan_micro_batches
    from seqpack.planning.packing import PackPlan as PackPlan
    from seqpack.planning.packing import pack as pack
    from seqpack.planning.padding import alignment as alignment
    from seqpack.planning.padding import packed_geometry as packed_geometry
    from seqpack.planning.padding import usable_capacity as usable_capacity

_EXPORTS = {
    "No": "seqpack.capability",
    "Supported": "seqpack.capability",
    "Unsupported": "seqpack.capability",
    "Yes": "seqpack.capability",
    "BalancePlan": "seqpack.planning.balancing",
    "BatchView": "seqpack.batches.view",
    "LayerFlops": "seqpack.planning.flops",
    "MicroBatchPlan": "seqpack.planning.micro_batches",
    "ModelFlops": "seqpack.planning.flops",
    "Objective": "seqpack.batches.objective",
    "PackPlan": "seqpack.planning.packing",
    "PackedBatch": "seqpack.batches.packed",
    "SequenceCost": "seqpack.planning.costs",
    "Totals": "seqpack.batches.view",
    "alignment": "seqpack.planning.padding",
    "balance": "seqpack.planning.balancing",
    "check_batch": "seqpack.batches.batch",
    "chunk": "seqpack.batches.operations",
    "concat": "seqpack.batches.operations",
    "from_padded": "seqpack.batches.operations",
    "index_select": "seqpack.batches.operations",
    "lengths": "seqpack.batches.batch",
    "make_batch": "seqpack.batches.batch",
    "model_flops": "seqpack.planning.family_flops",
    "pack": "seqpack.planning.packing",
    "pack_each": "seqpack.batches.packed",
    "pack_sequences": "seqpack.batches.packed",
    "packed_geometry": "seqpack.planning.padding",
    "plan_micro_batches": "seqpack.planning.micro_batches",
    "share_offsets": "seqpack.batches.dicts",
    "split": "seqpack.batches.operations",
    "to_padded": "seqpack.batches.operations",
    "unbind": "seqpack.batches.operations",
    "unpack_sequences": "seqpack.batches.packed",
    "unpack_tokens": "seqpack.batches.packed",
    "usable_capacity": "seqpack.planning.padding",
    "view_batch": "seqpack.batches.batch",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
