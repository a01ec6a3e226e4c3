"""What a sequence costs by its length: FLOPs of a forward pass, from a Hugging Face config (backward is twice that)."""

from dataclasses import dataclass
from typing import Any

from seqpack.planning.checks import check_positive_int
from seqpack.planning.family_flops import model_flops
from seqpack.planning.flops import GDN_CHUNK, ModelFlops


@dataclass(frozen=True)
class SequenceCost:
    """Forward FLOPs of a sequence of `length` tokens: `cost(length)`.

    `per_token`: matrix products with the parameters a token meets (of a mixture, the active ones), the causal
    convolutions and the head. `attention`: (window, FLOPs of a query-key pair), summed over layers of that window,
    None for full attention. `per_chunk`: linear attention, per started chunk of `chunk` tokens. With `whole_square`
    every pair is paid for, also those that the mask forbids, as by eager attention; fused kernels skip them.
    """

    per_token: float
    attention: tuple[tuple[int | None, float], ...] = ()
    per_chunk: float = 0.0
    chunk: int = GDN_CHUNK
    whole_square: bool = False

    def __call__(self, length: int) -> float:
        """Return the FLOPs of one sequence; ValueError when `length` is not a positive integer."""
        tokens = check_positive_int(length, "length")
        pairs = sum(flops * self.pairs(tokens, window) for window, flops in self.attention)
        return self.per_token * tokens + pairs + self.per_chunk * -(-tokens // self.chunk)

    def pairs(self, length: int, window: int | None = None) -> int:
        """Return the query-key pairs of a causal layer in which a token sees itself and `window - 1` before it."""
        if self.whole_square:
            return length * length
        seen = length if window is None else min(length, window)
        return seen * (seen + 1) // 2 + (length - seen) * seen

    @classmethod
    def from_config(cls, config: Any, lm_head: bool = True, whole_square: bool = False) -> "SequenceCost":
        """Read the text part of a Hugging Face config; vision towers are not counted.

        ValueError for a model type or layer type that is not known (see `seqpack.planning.family_flops`): give the
        numbers to SequenceCost yourself then.
        """
        return cls.of(model_flops(config), lm_head, whole_square)

    @classmethod
    def of(cls, model: ModelFlops, lm_head: bool = True, whole_square: bool = False) -> "SequenceCost":
        """Add up the layers of a model."""
        per_token = model.linear - (0.0 if lm_head else model.head)
        per_token += sum(layer.convolution for layer in model.layers)
        per_chunk = sum(layer.per_chunk for layer in model.layers)
        return cls(per_token, tuple(model.pairs.items()), per_chunk, GDN_CHUNK, whole_square)
