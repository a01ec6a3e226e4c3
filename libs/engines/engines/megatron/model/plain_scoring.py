"""Scores of Megatron's stages by plain operations, one sequence alone: what packed and fused layers are held to.

No stock module holds these weights. So the same stages compute, with nothing packed, shared over a sequence, or fused:
convolution, recurrence and attention in plain torch, norms and gates as megatron-core has them, logits unfused. A
weight that the bridge put into a wrong place is not seen here; exports and the families' own tests are for that.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from engines.capability import Supported, Unsupported
from engines.execution.executor import Scoring, TakeScores
from engines.execution.micro_batches import MicroBatches
from engines.inputs.model_inputs import PackedInputs
from engines.megatron.model.even_inputs import EvenInputs
from engines.parallel.planning import PlannedRows
from seqpack.adapters.context import LocalOps

PLAIN = LocalOps("torch")


class PlainScoring:
    """The part of the Megatron executor that scores so."""

    builder: EvenInputs
    compiled: Supported | Unsupported
    stages: Sequence[Any]

    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """See `engines.execution.executor.Executor`."""
        raise NotImplementedError

    def score_plain(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """See `engines.scoring.rechecks.PlainScores`."""
        before = self.builder, self.compiled
        own = self.builder.builder
        assert isinstance(own, PackedInputs)
        with ExitStack() as stack:
            for stage in self.stages:
                for applied in reversed([*vars(stage).get("_adaptations", {}).values()]):
                    stack.enter_context(applied.without())
            self.builder = EvenInputs(PackedInputs(PLAIN, own.vision, own.replay), self.builder.multiple)
            self.compiled = Unsupported("scored by plain operations")
            try:
                self.score(self._enough(micro_batches), take, scoring)
            finally:
                self.builder, self.compiled = before

    def _enough(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return the micro-batches with as many empty ones behind them as virtual stages need."""
        if len(self.stages) == 1:
            return micro_batches
        config = self.stages[0].config
        group, ranks = config.microbatch_group_size_per_vp_stage or 1, config.pipeline_model_parallel_size
        wanted = -(-max(len(micro_batches), group, ranks) // ranks) * ranks
        empty = [PlannedRows((), part.ranks) for part in micro_batches.parts[:1]] * (wanted - len(micro_batches))
        parts = [*micro_batches.parts, *empty]
        return MicroBatches(micro_batches.batch, parts, micro_batches.group, micro_batches.device, micro_batches.keys)
