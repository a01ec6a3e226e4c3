"""What an engine is built from: one frozen dataclass, checked when it is made."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. A value that cannot work is a ValueError here, before any model is loaded."""

    model: str | None = None
    """A local Hugging Face model directory; None when the module is handed to `build_engine`."""
    backend: Literal["fsdp2", "megatron"] = "fsdp2"
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    """"auto" is cuda where there is one, else cpu."""
    batching: Literal["packed", "padded"] = "packed"
    """"padded" is the plain reference path: rows padded to the longest of their micro-batch, the model untouched."""
    max_tokens_per_rank: int = 16384
    """Hard cap on the tokens of one rank's micro-batch."""
    context_parallel: str = "off"
    """"off", "static:N" or "dynamic"."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """What parameters and optimizer states are kept in."""
    skip_zero_gradient_rows: bool = True
    """Do not compute rows that add exactly nothing to loss and gradient (an objective says which), such as those of
    groups with equal rewards. Metrics then speak of the computed rows alone."""
    gradient_checkpointing: bool = False
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass (less memory, one more gather)."""
    temperature: float = 1.0
    """Log-probs are those of softmax(logits / temperature); give the sampler's."""
    logit_chunk: int = 4096
    """Tokens whose logits are in memory at once."""

    lr: float = 1e-5
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    """Where "linear" and "cosine" end."""
    min_lr_ratio: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices; norms, biases and other vectors are never decayed."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; None clips nothing."""

    def __post_init__(self) -> None:
        _choice("backend", self.backend, ("fsdp2", "megatron"))
        _choice("device", self.device, ("auto", "cpu", "cuda", "npu"))
        _choice("batching", self.batching, ("packed", "padded"))
        _choice("dtype", self.dtype, ("auto", "float32", "bfloat16"))
        _choice("master_dtype", self.master_dtype, ("float32", "bfloat16"))
        _choice("lr_schedule", self.lr_schedule, ("constant", "linear", "cosine"))
        parse_context_parallel(self.context_parallel)
        for name in ("max_tokens_per_rank", "logit_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature} (for greedy answers use 1.0 here)")
        if self.lr < 0 or self.warmup_steps < 0 or not 0 <= self.min_lr_ratio <= 1:
            raise ValueError("lr and warmup_steps must be at least 0, and min_lr_ratio between 0 and 1")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ValueError(f"grad_clip must be above 0, or None to clip nothing, got {self.grad_clip}")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.lr_schedule == "constant":
            if self.min_lr_ratio:
                raise ValueError("min_lr_ratio has no effect with lr_schedule 'constant': use 'linear' or 'cosine'")
        elif self.total_steps is None or self.total_steps <= self.warmup_steps:
            raise ValueError(f"lr_schedule {self.lr_schedule!r} needs total_steps above warmup_steps")


def parse_context_parallel(value: str) -> int | Literal["dynamic"]:
    """1 for "off", N for "static:N", or "dynamic"; ValueError for anything else."""
    if value == "off":
        return 1
    if value == "dynamic":
        return "dynamic"
    kind, _, number = value.partition(":")
    if kind == "static" and number.isdigit() and int(number) >= 1:
        return int(number)
    raise ValueError(f"context_parallel must be 'off', 'static:N' or 'dynamic', got {value!r}")


def _choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
