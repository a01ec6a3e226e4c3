"""The division of a step's sequences into mini-batches, ranks and micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchPlan:
    """`rank_sequences[m][r]`: sequences of mini-batch m on data-parallel rank r; at most `micro_batches[m]` of a rank.

    Each mini-batch is one optimizer step an epoch. Counts are for sequences of full length; shorter ones pack denser.
    """

    sequences: int
    rank_sequences: tuple[tuple[int, ...], ...]
    sequences_per_micro_batch: int
    micro_batches: tuple[int, ...]

    @property
    def idle_share(self) -> float:
        """Share of the ranks' micro-batches that would be empty at full length."""
        slots = sum(count * len(ranks) for count, ranks in zip(self.micro_batches, self.rank_sequences, strict=True))
        per = self.sequences_per_micro_batch
        used = sum(-(-count // per) for ranks in self.rank_sequences for count in ranks)
        return 1 - used / slots if slots else 0.0


def batch_problems(sequences: int, mini_batches: int, longest: int, tokens: int) -> list[str]:
    """Return the reasons why `plan_batches` would fail, each with its fix."""
    problems = []
    if longest > tokens:
        problems.append(
            f"a sequence of {longest} tokens does not fit a micro-batch of {tokens}: raise "
            f"--trainer.max-tokens-per-rank, share a sequence among {-(-longest // tokens)} times as many ranks by "
            "--parallel.context, or lower the lengths"
        )
    if mini_batches > sequences:
        problems.append(f"{sequences} sequences are too few for {mini_batches} mini-batches: lower the latter")
    return problems


def plan_batches(sequences: int, mini_batches: int, dp: int, longest: int, tokens: int) -> BatchPlan:
    """Split a step's sequences; `tokens` is the micro-batch size of the ranks that share a sequence, together.

    Raises:
        ValueError: a sequence of `longest` tokens does not fit, or there are more mini-batches than sequences.
    """
    problems = batch_problems(sequences, mini_batches, longest, tokens)
    if problems:
        raise ValueError("; ".join(problems))
    per = tokens // longest
    ranks = tuple(split_evenly(count, dp) for count in split_evenly(sequences, mini_batches))
    return BatchPlan(sequences, ranks, per, tuple(-(-max(counts) // per) for counts in ranks))


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """Split into parts that differ by at most one and sum to `total`; the larger ones come first."""
    each, over = divmod(total, parts)
    return tuple(each + (part < over) for part in range(parts))


def bubble_share(micro_batches: int, stages: int, chunks: int = 1) -> float:
    """Return the share of a 1F1B pipeline's time that a stage waits: (p - 1) / (v m + p - 1), arXiv 2104.04473."""
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def span(counts: Sequence[int]) -> str:
    """Return the number as text where all are equal, else the least and the most."""
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"
