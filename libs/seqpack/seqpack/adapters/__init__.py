"""seqpack in other people's training loops: samplers, streams, collators, and models that take packed rows.

In a transformers `Trainer` (TRL's `SFTTrainer` is one; give it `dataset_kwargs={"skip_prepare_dataset": True}`):

    class PackedTrainer(Trainer):
        def get_train_dataloader(self):
            args = self.args
            return packed_dataloader(
                self.train_dataset, 8192, rank=args.process_index, world_size=args.world_size, seed=args.seed
            )

    adapt_for_packing(model)  # keeps packed sequences apart, with or without flash-attn and fla

In any loop: `DataLoader(samples, batch_sampler=PackedBatchSampler(...), collate_fn=PackedCollator())` for a list,
`DataLoader(PackedStream(source, max_tokens), batch_size=None, collate_fn=PackedCollator())` for a stream; `TitanRows`
for torchtitan, `packed_seq_arguments` for Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seqpack.adapters.arguments import IGNORED as IGNORED
    from seqpack.adapters.arguments import flash_arguments as flash_arguments
    from seqpack.adapters.arguments import packed_seq_arguments as packed_seq_arguments
    from seqpack.adapters.arguments import sequence_index as sequence_index
    from seqpack.adapters.collator import PackedCollator as PackedCollator
    from seqpack.adapters.huggingface import adapt_for_packing as adapt_for_packing
    from seqpack.adapters.huggingface import packed_forward as packed_forward
    from seqpack.adapters.loader import packed_dataloader as packed_dataloader
    from seqpack.adapters.mixers import Adaptation as Adaptation
    from seqpack.adapters.sampler import PackedBatchSampler as PackedBatchSampler
    from seqpack.adapters.stream import PackedStream as PackedStream
    from seqpack.adapters.titan import TitanRows as TitanRows

_EXPORTS = {
    "Adaptation": "seqpack.adapters.mixers",
    "IGNORED": "seqpack.adapters.arguments",
    "PackedBatchSampler": "seqpack.adapters.sampler",
    "PackedCollator": "seqpack.adapters.collator",
    "PackedStream": "seqpack.adapters.stream",
    "TitanRows": "seqpack.adapters.titan",
    "adapt_for_packing": "seqpack.adapters.huggingface",
    "flash_arguments": "seqpack.adapters.arguments",
    "packed_dataloader": "seqpack.adapters.loader",
    "packed_forward": "seqpack.adapters.huggingface",
    "packed_seq_arguments": "seqpack.adapters.arguments",
    "sequence_index": "seqpack.adapters.arguments",
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
