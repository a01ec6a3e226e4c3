"""Qwen3.5 without its vision tower, for releases of vLLM whose registry lacks it (0.32 has it, 0.26 does not).

There the classes exist as parts of the vision-language ones. What they lack is taken from vLLM's hybrid interface, and
is the same with and without a tower: shapes and dtypes of the delta nets' states, and positions that count tokens.
"""

from typing import Any

import torch
from vllm.model_executor.models import ModelRegistry, qwen3_5
from vllm.model_executor.models.interfaces import IsHybrid, SupportsMRoPE

STATES = (
    "get_mamba_state_dtype_from_config",
    "get_mamba_state_shape_from_config",
    "get_mamba_state_copy_func",
)
VISION_MODELS = {
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}
"""Text models, and those that have a tower in front of them."""


def register_text_models() -> None:
    """Add the missing models to this vLLM's registry."""
    known = ModelRegistry.get_supported_archs()
    for name, seeing in VISION_MODELS.items():
        if name not in known:
            ModelRegistry.register_model(name, _text_model(name, getattr(qwen3_5, seeing)))


def _text_model(name: str, seeing: type) -> type:
    methods: dict[str, Any] = {method: seeing.__dict__[method] for method in STATES if method in seeing.__dict__}
    inherited = {method: qwen3_5.Qwen3_5ForConditionalGeneration.__dict__[method] for method in STATES}
    methods = inherited | methods | {"get_mrope_input_positions": _positions}
    return type(name, (getattr(qwen3_5, name), IsHybrid, SupportsMRoPE), methods)


def _positions(_: Any, input_tokens: list[int], mm_features: list[Any]) -> tuple[torch.Tensor, int]:
    """Return positions i64[3, tokens] that count tokens on all three axes."""
    if mm_features:
        raise ValueError("a text model is given no images")
    return torch.arange(len(input_tokens)).expand(3, -1), 0
