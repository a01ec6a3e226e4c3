"""Distillation: a policy learns a teacher's distribution at every token of its own answers (or of others')."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from objectives.checks import check_choice, check_number, check_without_effect, gathered
from objectives.choices import AGGREGATIONS, DIVERGENCES, Aggregation, Divergence, check_max_tokens

if TYPE_CHECKING:  # a command line makes these settings, and needs no torch for it
    from tensordict import TensorDict
    from torch import Tensor

    from seqpack.batches.packed import PackedBatch
    from seqpack.batches.view import BatchView, Totals


@dataclass(frozen=True)
class Distillation:
    """The divergence from a teacher at the trained tokens, over K tokens and all others together.

    The batch has the teacher's `teacher_tokens` i64 (B, K, j) (-1: none), `teacher_log_probs` f32 (B, K, j) and
    `teacher_rest` f32 (B, j), the log-prob of all other tokens: what `TrainEngine.forward(batch, top_k=K)` of a teacher
    gives. On-policy distillation (arXiv 2306.13649, algorithm 1) has rows that the policy sampled; no gradient flows to
    which tokens were sampled. See `objectives.divergence`.
    """

    divergence: Divergence = "forward"
    """From the teacher to the policy ("forward"), from the policy to the teacher ("reverse"), or between ("jsd")."""
    jsd_weight: float | None = None
    """Weight of the teacher in the mixture of "jsd"; 0.5 where None."""
    aggregation: Aggregation = "token"
    """Tokens to one number: every token weighs the same, every answer does, or a constant divides."""
    max_tokens: int | None = None
    """What "constant" divides by, beside the number of answers: the longest answer that may be sampled."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Return a text for each problem."""
        checks: list[Callable[[], object]] = [
            partial(check_choice, "divergence", self.divergence, DIVERGENCES),
            partial(check_choice, "aggregation", self.aggregation, AGGREGATIONS),
        ]
        if self.divergence != "jsd":
            checks.append(partial(check_without_effect, "jsd_weight", self.jsd_weight, "it is of divergence 'jsd'"))
        elif self.jsd_weight is not None:
            checks.append(partial(check_number, "jsd_weight", self.jsd_weight, 1e-6, 1 - 1e-6))
        if self.aggregation == "constant":
            checks.append(partial(check_max_tokens, self.max_tokens))
        else:
            checks.append(partial(check_without_effect, "max_tokens", self.max_tokens, "aggregation 'constant' has it"))
        return gathered(checks)

    @property
    def required_keys(self) -> tuple[str, ...]:
        """The teacher's keys."""
        return ("teacher_tokens", "teacher_log_probs", "teacher_rest")

    @property
    def needs_entropy(self) -> bool:
        """The need for entropies: always False."""
        return False

    @property
    def needs_tokens(self) -> str:
        """The key of the tokens whose log-probs are read."""
        return "teacher_tokens"

    def zero_gradient_rows(self, batch: TensorDict | BatchView) -> Tensor:
        """Return bool[B], rows without a trained token."""
        from objectives.objective import rows_without_gradient  # slow to load

        return rows_without_gradient(batch)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss as `seqpack.Objective` defines it; metrics: distill/divergence, and distill/teacher_mass and
        distill/policy_mass, the probability of the K tokens; mismatch/* where the batch has `rollout_log_probs`."""
        from objectives.divergence import divergence, events  # slow to load
        from objectives.losses import aggregate  # slow to load
        from objectives.objective import trained_mask  # slow to load
        from objectives.off_policy import mismatch  # slow to load
        from objectives.sums import pair, wide  # slow to load

        del entropy
        mask, values = trained_mask(batch), batch.values
        tokens = values["teacher_tokens"]
        given = [(values[f"{who}_log_probs"], values[f"{who}_rest"]) for who in ("several", "teacher")]
        # what does not train holds placeholders, which must not reach an exp
        policy, teacher = (
            events(several.masked_fill(~mask, 0), rest.masked_fill(~mask, 0), tokens) for several, rest in given
        )
        weight = 0.5 if self.jsd_weight is None else self.jsd_weight
        per_token = divergence(policy, teacher, self.divergence, weight)
        loss = aggregate(
            per_token,
            mask,
            batch.cu_seqlens,
            self.aggregation,
            totals.tokens,
            totals.answers,
            self.max_tokens,
            batch.values.get("episode_tokens"),
        )
        metrics = {"distill/divergence": pair(per_token, mask)}
        if (sampled := values.get("rollout_log_probs")) is not None:
            start = values.get("old_log_probs", log_probs)
            now, then = (wide(x.detach()).masked_fill(~mask, 0) for x in (start, sampled))
            metrics |= mismatch(now, then, mask)
        for name, table in (("policy", policy), ("teacher", teacher)):
            metrics[f"distill/{name}_mass"] = pair(1 - table[-1].exp(), mask)
        return loss, metrics
