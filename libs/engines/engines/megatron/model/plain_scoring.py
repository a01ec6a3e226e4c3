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
                self.score(micro_batches, take, scoring)
            finally:
                self.builder, self.compiled = before
