"""The operands of one call of each operation, checked by the public function and handed to the backend that runs it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class ConvCall:
    """Operands of `causal_conv1d`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    cu_seqlens: Tensor
    activation: str | None
    initial_state: Tensor | None


@dataclass(frozen=True)
class DeltaCall:
    """Operands of `gated_delta_rule`; `scale` is filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    cu_seqlens: Tensor
    scale: float
    l2norm_qk: bool
    initial_state: Tensor | None
    output_final_state: bool
    chunk_size: int | None


@dataclass(frozen=True)
class DeltaStep:
    """Operands of `gated_delta_rule_step`; `scale` is filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    scale: float
    l2norm_qk: bool
    inplace: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """Operands of `attention`; `scale` is filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    scale: float
    causal: bool
    window: int | None
    max_seqlen: int | None
    soft_cap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    alibi: Tensor | None = None
