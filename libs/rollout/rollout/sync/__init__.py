"""Weight sync: pieces and buckets, a receiver's staging, and one decision over all receivers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollout.sync.adapter import Adapter as Adapter
    from rollout.sync.assembler import WeightAssembler as WeightAssembler
    from rollout.sync.assembler import assemble as assemble
    from rollout.sync.boxes import Box as Box
    from rollout.sync.manifest import Manifest as Manifest
    from rollout.sync.manifest import TensorSpec as TensorSpec
    from rollout.sync.manifest import manifest_of as manifest_of
    from rollout.sync.parallel_boxes import WorkerLayout as WorkerLayout
    from rollout.sync.parallel_boxes import worker_boxes as worker_boxes
    from rollout.sync.pieces import Bucket as Bucket
    from rollout.sync.pieces import BucketPiece as BucketPiece
    from rollout.sync.pieces import Checksum as Checksum
    from rollout.sync.pieces import Piece as Piece
    from rollout.sync.pieces import bucket_of as bucket_of
    from rollout.sync.pieces import buckets as buckets
    from rollout.sync.pieces import checksum as checksum
    from rollout.sync.shard_plan import Shard as Shard
    from rollout.sync.shard_plan import SyncPlan as SyncPlan
    from rollout.sync.shard_plan import plan_sync as plan_sync
    from rollout.sync.staging import WeightStaging as WeightStaging
    from rollout.sync.transfer import share_weights as share_weights
    from rollout.sync.transfer import transfer_weights as transfer_weights

_EXPORTS = {
    "Adapter": "rollout.sync.adapter",
    "Box": "rollout.sync.boxes",
    "Bucket": "rollout.sync.pieces",
    "BucketPiece": "rollout.sync.pieces",
    "Checksum": "rollout.sync.pieces",
    "Manifest": "rollout.sync.manifest",
    "Piece": "rollout.sync.pieces",
    "Shard": "rollout.sync.shard_plan",
    "SyncPlan": "rollout.sync.shard_plan",
    "TensorSpec": "rollout.sync.manifest",
    "WeightAssembler": "rollout.sync.assembler",
    "WeightStaging": "rollout.sync.staging",
    "WorkerLayout": "rollout.sync.parallel_boxes",
    "assemble": "rollout.sync.assembler",
    "bucket_of": "rollout.sync.pieces",
    "buckets": "rollout.sync.pieces",
    "checksum": "rollout.sync.pieces",
    "manifest_of": "rollout.sync.manifest",
    "plan_sync": "rollout.sync.shard_plan",
    "share_weights": "rollout.sync.transfer",
    "transfer_weights": "rollout.sync.transfer",
    "worker_boxes": "rollout.sync.parallel_boxes",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Import the module that holds `name` on first use."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(_EXPORTS)
