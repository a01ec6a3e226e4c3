"""Make a Hugging Face causal LM of a registered family right on packed sequences; see `seqpack.adapters.mixers`."""

from typing import Any

from torch import Tensor

from engines.families.registry import family_of
from engines.mtp.head import pack_head
from seqpack.adapters.context import PackedContext, PackedOps
from seqpack.adapters.mixers import Adaptation, adapt_mixers, packed_hidden
from seqpack.batches.packed import PackedBatch


def adapt_for_packing(model: Any) -> Adaptation:
    """Prepare this model instance for packed calls; one that is prepared already stays as it is.

    ValueError for a model whose family is not registered, or that is not what its family says.
    """
    config = getattr(model, "config", None)
    if config is None:
        raise ValueError("adapt_for_packing needs a transformers model, this one has no config")
    family = family_of(config)
    if not family.packs:
        raise ValueError(f"packed rows of {config.model_type} differ from stock transformers: set batching='padded'")
    family.check_module(model)
    pack_head(model)
    mixers = [mixer for layer in family.layers(model) for mixer in family.mixers(layer)]
    return adapt_mixers(model, mixers, family.decoder(model), by_mask=not family.registered)


def packed_logits(model: Any, packed: PackedBatch, ops: PackedOps | None = None) -> Tensor:
    """Return all logits [T, V] of a packed batch: for tests and small models."""
    context = PackedContext(packed.cu_seqlens, packed.max_seqlen, ops=ops)
    hidden = packed_hidden(model, packed.values["input_ids"], packed.position_ids, context)
    logits: Tensor = family_of(model.config).head(model)(hidden)
    return logits
