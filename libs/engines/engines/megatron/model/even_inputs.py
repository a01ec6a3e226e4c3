"""Micro-batches whose tokens divide by the tensor-parallel ranks: sequence parallelism gives each a part of them."""

from dataclasses import dataclass, replace

from torch import Tensor
from torch.nn import functional

from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.inputs.model_inputs import InputBuilder, ModelInputs
from engines.parallel.groups import ParallelGroups
from engines.parallel.planning import PlannedRows
from seqpack.adapters.context import PackedContext


@dataclass(frozen=True)
class EvenInputs:
    """Another builder's inputs, padded at the end by a sequence of its own that nothing counts."""

    builder: InputBuilder
    multiple: int

    def inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """See `engines.inputs.model_inputs.InputBuilder`."""
        inputs = self.builder.inputs(micro_batch)
        missing = -inputs.input_ids.numel() % self.multiple
        return _padded(inputs, missing) if missing else inputs

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """See `InputBuilder`."""
        return self.builder.collect(scores, inputs)

    def total(self, value: Tensor, inputs: ModelInputs) -> Tensor:
        """See `InputBuilder`."""
        return self.builder.total(value, inputs)


def even_rounds(micro_batches: MicroBatches, groups: ParallelGroups, chunks: int) -> MicroBatches:
    """Add dummies: virtual stages take micro-batches in rounds of as many as there are stages."""
    missing = -len(micro_batches) % groups.layout.pp
    if chunks == 1 or not missing:
        return micro_batches
    parts = (*micro_batches.parts, *[PlannedRows((), (groups.plan_index,))] * missing)
    source = micro_batches
    return MicroBatches(source.batch, parts, source.group, source.device, source.keys)


def _padded(inputs: ModelInputs, missing: int) -> ModelInputs:
    context = inputs.context
    assert context is not None
    assert context.cp_group is None, "shards of a group are made even by the planner's layout"
    tokens = inputs.input_ids.numel()
    ends = context.cu_seqlens.new_tensor([tokens + missing])
    longer = PackedContext(
        context.cu_seqlens.new_empty(0).new_tensor([*context.cu_seqlens.tolist(), int(ends)]),
        max(context.max_seqlen, missing),
        ops=context.ops,
        edges=None if context.edges is None else (*context.edges, tokens + missing),
    )
    return replace(
        inputs,
        input_ids=functional.pad(inputs.input_ids, (0, missing)),
        position_ids=functional.pad(inputs.position_ids, (0, missing)),
        counted=functional.pad(inputs.counted, (0, missing)),
        experts=None if inputs.experts is None else functional.pad(inputs.experts, (0, 0, 0, 0, 0, missing), value=-1),
        context=longer,
        mtp=None if inputs.mtp is None else replace(inputs.mtp, ids=functional.pad(inputs.mtp.ids, (0, missing))),
    )
