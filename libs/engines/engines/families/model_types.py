"""The model types of this project's families by name, for a plan: nothing slow is imported."""

MODEL_TYPES = {
    "qwen3_5": ("qwen3_5_text",),
    "qwen3_5_moe": ("qwen3_5_moe_text",),
    "qwen3_next": ("qwen3_next",),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3_moe",),
    "qwen2": ("qwen2",),
    "llama": ("llama",),
    "mistral": ("mistral",),
    "gemma3": ("gemma3_text",),
}
"""Types of text configs; `engines.families.registry` has the families themselves, and those of users."""
