"""Weight sync: a sampler gets the trainer's present weights, on all ranks or on none."""

from collections.abc import Iterator
from typing import Any, Literal

from rollout import SharingEngine, share_weights
from rollout.sync import Bucket, Manifest, buckets, transfer_weights
from rollout.sync.transfer import Receiver
from schedules.protocols import SharingTrainer, Trainer
from schedules.runtime.collectives import all_agree
from schedules.runtime.interrupts import Runner
from schedules.weights.shard_buckets import shard_buckets
from schedules.weights.transfer_result import TransferResult
from seqpack.memory import ledger

BUCKET_BYTES = 1 << 26  # of weights on their way to the sampler
SHARD_BYTES = 1 << 24  # the same where ranks send their shards: four are on their way


def sync_weights(
    trainer: Trainer,
    sampler: Receiver,
    version: int,
    runner: Runner,
    *,
    module_names: bool,
    pause: Literal["finish", "abort"] | None = None,
) -> TransferResult:
    """Give a sampler the trainer's present weights as number `version`. Every rank calls it.

    The samplers of all ranks take them, or none does. Of a trainer with an adapter that alone: a sampler begins with
    the base. `module_names`: under the names of the trained module, in place of a checkpoint's. `pause`: how sampling
    is held meanwhile (`rollout.transfer_weights`). Where the trainer exports its shards, each rank sends its own to
    those that have a sampler, or to the first rank's pool, and no tensor is gathered (`shard_buckets`).
    """
    size, device = 0, "cpu"
    export = trainer.export_weights(module_names)

    def sharded() -> Iterator[Bucket]:
        nonlocal size, device
        for bucket in shard_buckets(export.shards or (), sampler, version, SHARD_BYTES):
            device = str(bucket.buffer.device)
            size += bucket.nbytes
            yield bucket

    def measured() -> Iterator[Any]:
        nonlocal size, device
        for piece in export.pieces:
            device = str(piece.flat.device)
            size += piece.flat.numel() * piece.flat.element_size()
            yield piece

    def recorded() -> Iterator[Bucket]:
        for bucket in buckets(measured(), BUCKET_BYTES):
            ledger.record(ledger.BUCKETS, bucket.buffer)
            yield bucket

    manifest = Manifest(version, adapter=export.adapter)
    stream = recorded() if export.shards is None else sharded()
    times = runner.run(transfer_weights([sampler], manifest, stream, pause=pause, all_reduce_ok=all_agree))
    return TransferResult(size, times, "cpu" if getattr(sampler, "through_host", False) else device)


def sync_shared_weights(trainer: Trainer, sampler: SharingEngine, version: int, runner: Runner) -> TransferResult:
    """Let a sampler that computes with the trainer's own tensors have them as number `version`; no byte is copied.
    Every rank calls it, and their samplers all go on, or none does.

    Raises:
        RuntimeError: the trainer shares them no longer (it was moved to the host).
        NonFiniteError: they are not finite; the sampler then answers nobody.
    """
    if not isinstance(trainer, SharingTrainer):
        raise RuntimeError(f"weights {version} can't be shared with the sampler: the trainer has no shared_weights()")
    return TransferResult(
        0, runner.run(share_weights(sampler, version, trainer.shared_weights(), all_reduce_ok=all_agree))
    )
