"""What speculative decoding drafts with: the model's own head for multi-token prediction (`mtp.*`), or no model at all.

The rollout engine hands vLLM all weights itself (`load_format` dummy), so that a draft model of another directory would
keep random ones: it is refused. Tokens, log-probs and versions are the target model's whatever drafts.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

HEAD = "mtp."
"""Names on disk of the head for multi-token prediction begin so."""
SHARED = ("embed_tokens.weight", "lm_head.weight")
"""Ends of names of what the head shares with the model."""
MODEL_FREE = ("ngram", "ngram_gpu", "suffix")
"""Methods that draft from the tokens so far."""


def draft_refusal(arguments: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return why the `speculative_config` among vLLM's engine arguments can't be used with a checkpoint of these
    tensors; None where it can, or there is none."""
    settings = arguments.get("speculative_config")
    if not settings:
        return None
    method = settings.get("method")
    if settings.get("model") is not None or not (method in MODEL_FREE or method == "mtp"):
        return (
            f"speculative_config {dict(settings)}: a draft model of its own would keep random weights, as all weights "
            f"come from the trainer: set method to mtp (the checkpoint's own head) or one of {', '.join(MODEL_FREE)}"
        )
    if method == "mtp" and not any(name.startswith(HEAD) for name in names):
        return "speculative_config of method mtp: the checkpoint has no mtp.* tensors, whose head would draft"
    return None


def recorded(tensors: Iterable[tuple[str, T]], kept: dict[str, T]) -> Iterator[tuple[str, T]]:
    """Yield the tensors of a checkpoint; `kept` gets those that the head and what it shares have."""
    for name, tensor in tensors:
        if name.startswith(HEAD) or name.endswith(SHARED):
            kept[name] = tensor
        yield name, tensor
