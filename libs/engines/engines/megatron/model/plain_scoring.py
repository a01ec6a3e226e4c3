"""Scores of Megatron's stages by plain operations, one sequence alone: what packed and fused layers are held to.

No stock module holds these weights. So the same stages compute, with nothing packed, shared over a sequence, or fused:
convolution, recurrence and attention in plain torch, norms and gates as megatron-core has them, logits unfused. A
weight that the bridge put into a wrong place is not seen here; exports and the families' own tests are for that.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.execution.executor import Scores, Scoring, TakeScores, collected
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.families.router import RouterCounts
from engines.fast.fused_log_probs import fused_log_probs
from engines.inputs.model_inputs import ModelInputs, PackedInputs
from engines.megatron.model.attention import PackedTokens
from engines.megatron.model.even_inputs import EvenInputs
from engines.megatron.model.mtp_head import mtp_scores
from engines.megatron.model.router import Balance
from engines.parallel.groups import ParallelGroups
from engines.parallel.planning import PlannedRows
from engines.scoring.log_probs import scored, token_log_probs
from engines.scoring.mtp_scores import collected_mtp
from seqpack.adapters.context import LocalOps
from seqpack.batches.packed import PackedBatch

PLAIN = LocalOps("torch")


class PlainScoring:
    """The part of the Megatron executor that scores: as it trains, or by plain operations."""

    balance: Balance | None
    builder: EvenInputs
    compiled: Supported | Unsupported
    groups: ParallelGroups
    config: EngineConfig
    settings: Any
    stages: Sequence[Any]
    trainable: bool
    vocabulary: range

    def _run(
        self,
        micro_batches: MicroBatches,
        finish: Callable[[MicroBatch, Any], Tensor],
        scoring: Scoring | None,
        forward_only: bool,
        counting: bool = False,
        ahead: int = 0,
    ) -> None:
        raise NotImplementedError

    def _packed(self, inputs: ModelInputs, counting: bool) -> PackedTokens:
        raise NotImplementedError

    def _scores(self, hidden: Tensor, packed: PackedBatch, inputs: ModelInputs, scoring: Scoring) -> Scores:
        """Compute scores from the last stage's hidden states [T, 1, H] (a part of T under sequence parallelism)."""
        group, states = parallel_state.get_tensor_model_parallel_group(), hidden
        if self.settings.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        chosen = hidden.squeeze(1).index_select(0, inputs.rows)
        head = self.stages[-1].head[: self.vocabulary.stop - self.vocabulary.start]
        args = scoring.several(packed, inputs.slots), scoring.temperature, self.config.logit_chunk, scoring.entropy
        options = {"group": group, "first": self.vocabulary.start} if group.size() > 1 else {}
        plain = fused_log_probs if isinstance(self.compiled, Supported) and not options else token_log_probs
        scores = scored(plain, (chosen, head, inputs.targets), *args, **options)
        every = collected(lambda x: self.builder.collect(x, inputs), *scores)
        if not scoring.mtp:
            return every
        how = scoring.temperature, self.config.logit_chunk, self.vocabulary
        further = mtp_scores(self.stages[-1], inputs, states, self._packed(inputs, False), *how)
        return replace(every, mtp=collected_mtp(self.builder, inputs, further))

    @torch.no_grad()
    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> RouterCounts | None:
        """Run the forward half of the schedule; count for the router's losses of a step."""
        if self.balance is None or not self.trainable:
            self._score(micro_batches, take, scoring)
            return None
        self.balance.begin()
        self._score(micro_batches, take, scoring, counting=True)
        return self.balance.counted_all(self.groups.world)

    @torch.no_grad()
    def _score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring, counting: bool = False) -> None:
        """Run the forward half of the schedule, and no more."""

        def taken(micro_batch: MicroBatch, scores: Scores) -> Tensor:
            take(micro_batch, scores)
            return scores.log_probs.new_zeros(())

        self._run(micro_batches, taken, scoring, forward_only=True, counting=counting)

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
                self._score(self._enough(micro_batches), take, scoring)
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
