"""Marks of a message that say whether it is trained, under the names that trainers and fine-tuning services give them.

| key | who has it | trained |
| --- | --- | --- |
| `weight` | OpenAI, Mistral, Together | 1, not 0 |
| `train`, `training`, `trainable` | axolotl (`message_field_training`) | true, not false |
| `loss`, `loss_scale` | ms-swift | true or 1, not false or 0 |
| `loss_mask`, `step_loss_mask` | verl, slime | 1, not 0 |
| `masked` | torchtune | false, not true |

A null is no mark. A fraction is refused, as the loss weighs all trained tokens alike.
"""

from collections.abc import Mapping
from typing import Any

TRAINED, MASKED = True, False
MARKS = {
    **dict.fromkeys(
        ("weight", "train", "training", "trainable", "loss", "loss_scale", "loss_mask", "step_loss_mask"), TRAINED
    ),
    "masked": MASKED,
}
"""The keys, and what a true value means."""
REFUSED = {
    "train_detail": "it marks parts of a message, and a message is trained whole or not at all: split the message, or "
    "remove the key",
}
"""Keys of marks that can't be obeyed, and why."""
READ = frozenset(("role", "content", "tool_calls", "tool_call_id", "name"))
"""The keys of a message that need not be in a chat template to be of use."""


def split_marks(message: Mapping[str, Any]) -> tuple[dict[str, Any], bool | None]:
    """Return a message without its marks, and whether it is to be trained; None where it does not say.

    Raises:
        ValueError: a mark can't be obeyed, or two contradict each other.
    """
    for key in REFUSED.keys() & message.keys():
        if message[key] is not None:
            raise ValueError(f"a message has {key!r}: {REFUSED[key]}")
    found = {key: _value(key, message[key]) for key in MARKS if message.get(key) is not None}
    if len(set(found.values())) > 1:
        said = ", ".join(f"{key} {message[key]!r}" for key in found)
        raise ValueError(f"a message is marked to be trained and not to be trained ({said}): keep one mark")
    plain = {key: value for key, value in message.items() if key not in MARKS and key not in REFUSED}
    return plain, next(iter(found.values()), None)


def _value(key: str, mark: Any) -> bool:
    if not isinstance(mark, bool | int | float) or mark not in (0, 1):
        what = "a fraction" if isinstance(mark, float) else "neither"
        raise ValueError(
            f"a message has {key} {mark!r:.40}, {what}: it is trained (1 or true) or not (0 or false), as the loss "
            "weighs all trained tokens alike"
        )
    return bool(mark) is MARKS[key]
