"""What an engine is built from: one frozen dataclass, checked when it is made."""

import math
from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Literal, get_args, get_origin


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
    """Where "linear" and "cosine" end; None for "constant"."""
    min_lr_ratio: float = 0.0
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """On matrices; norms, biases and other vectors are never decayed."""
    grad_clip: float | None = 1.0
    """Largest global gradient norm; None clips nothing."""

    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a loss or gradient that is NaN or infinite does, always without an update: "stop" ends the run with
    `engines.NonFiniteError`, "skip" goes on with the next batch, and ends it at the tenth such step in a row."""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), field.type)
        parse_context_parallel(self.context_parallel)
        for name in ("max_tokens_per_rank", "logit_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("lr", "warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature} (for greedy answers use 1.0 here)")
        if self.eps <= 0:
            raise ValueError(f"eps must be above 0, got {self.eps}: a gradient of zero would divide by it")
        if not 0 <= self.min_lr_ratio <= 1:
            raise ValueError(f"min_lr_ratio must be between 0 and 1, got {self.min_lr_ratio}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if self.grad_clip is not None and self.grad_clip <= 0:
            raise ValueError(f"grad_clip must be above 0, or None to clip nothing, got {self.grad_clip}")
        self._check_schedule()

    def _check_schedule(self) -> None:
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"total_steps must be at least 1, got {self.total_steps}")
        if self.lr_schedule == "constant":
            if self.min_lr_ratio:
                raise ValueError("min_lr_ratio has no effect with lr_schedule 'constant': use 'linear' or 'cosine'")
            if self.total_steps is not None:
                raise ValueError("total_steps has no effect with lr_schedule 'constant': use 'linear' or 'cosine'")
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


def _check_type(name: str, value: Any, wanted: Any) -> None:
    """ValueError unless the value is of the field's type: one of its choices, a finite number, ..."""
    if get_origin(wanted) is Literal:
        if value not in get_args(wanted):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(wanted)))}, got {value!r}")
    elif get_origin(wanted) is UnionType:
        if value is not None:
            _check_type(name, value, get_args(wanted)[0])
    elif get_origin(wanted) is tuple:
        if not isinstance(value, tuple) or len(value) != len(get_args(wanted)):
            raise ValueError(f"{name} must be a tuple of {len(get_args(wanted))} numbers, got {value!r}")
        for entry, kind in zip(value, get_args(wanted), strict=True):
            _check_type(name, entry, kind)
    elif wanted is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
    elif not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be {wanted.__name__}, got {value!r}")
