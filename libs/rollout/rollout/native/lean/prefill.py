"""Prompts side by side in one packed pass: no padding, and the caches that decoding continues from."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from rollout.native.lean.padded import Padded
from seqpack.ops import attention, causal_conv1d, causal_conv1d_state, gated_delta_rule


@dataclass
class PackedCache:
    """Caches after m prompts of T tokens together; it is the pass's `Mixers` and keeps the state of each layer.

    `kv` [T, 2, Hkv, D] an attention layer; `conv` [m, D, K - 1] and `state` [m, Hv, Dk, Dv] a delta net. `ahead`: the
    position of the token that follows a prompt, less its length; below 0 after images.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    ahead: tuple[int, ...]
    kv: list[Tensor] = field(default_factory=list)
    conv: list[Tensor] = field(default_factory=list)
    state: list[Tensor] = field(default_factory=list)

    @cached_property
    def _padded(self) -> Padded | None:
        return Padded(self.lengths) if self.cu_seqlens.device.type == "cpu" else None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, ahead: Sequence[int] | None = None) -> "PackedCache":
        """Return an empty cache for prompts of these lengths, of text where `ahead` is None."""
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(tuple(lengths), bounds, tuple(ahead or [0] * len(lengths)))

    def convolve(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        """Convolve each prompt by itself, and keep its last K - 1 inputs."""
        assert index == len(self.conv)
        self.conv.append(causal_conv1d_state(x, self.cu_seqlens, weight.shape[1]))
        return causal_conv1d(x, weight, None, self.cu_seqlens, "silu")

    def recur(self, index: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Run the recurrence of each prompt from a zero state, and keep its last state."""
        assert index == len(self.state)
        o, final = gated_delta_rule(q, k, v, g, beta, self.cu_seqlens, output_final_state=True)
        assert final is not None
        self.state.append(final)
        return o

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return causal attention within each prompt, and keep keys and values."""
        assert index == len(self.kv)
        self.kv.append(torch.stack([k, v], dim=1))
        if self._padded is not None:
            return self._padded.attend(q, k, v, scale)
        return attention(q, k, v, self.cu_seqlens, scale, max_seqlen=max(self.lengths))

    def tokens_of(self, picks: Sequence[int]) -> Tensor:
        """Return the indices of the tokens of the picked prompts, prompt by prompt, int64."""
        starts = [0, *accumulate(self.lengths)]
        return spans([starts[i] for i in picks], [self.lengths[i] for i in picks], self.cu_seqlens.device)


def spans(starts: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return start, start + 1, ..., start + length - 1 of each, one after another, int64."""
    sizes = torch.tensor(lengths)
    ends = sizes.cumsum(0)
    shifts = torch.tensor(starts) - (ends - sizes)  # from an index in the result to its value
    return (shifts.repeat_interleave(sizes) + torch.arange(sum(lengths))).to(device)
