"""Marks of a message that say how much it is trained, under the names that trainers and fine-tuning services give them.

| key | who has it | trained |
| --- | --- | --- |
| `weight` | OpenAI, Mistral, Together | 1, not 0 |
| `train`, `training`, `trainable` | axolotl (`message_field_training`) | true, not false |
| `loss`, `loss_scale` | ms-swift | true or 1, not false or 0 |
| `loss_mask`, `step_loss_mask` | verl, slime | 1, not 0 |
| `masked` | torchtune | false, not true |

A null is no mark. Other numbers than 0 and 1 (but for `masked`) are weights: the losses of the message's tokens are
multiplied by them.
"""

import math
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
    "train_detail": "it marks parts of a message, and a message has one weight: split the message, give the row as "
    "input_ids with loss_weights, or remove the key",
}
"""Keys of marks that can't be obeyed, and why."""
READ = frozenset(("role", "content", "tool_calls", "tool_call_id", "name"))
"""The keys of a message that need not be in a chat template to be of use."""


def split_marks(message: Mapping[str, Any]) -> tuple[dict[str, Any], float | None]:
    """Return a message without its marks, and its weight, 0 where it is not to be trained; None where it does not say.

    Raises:
        ValueError: a mark can't be obeyed, or two contradict each other.
    """
    if MARKS.keys().isdisjoint(message) and REFUSED.keys().isdisjoint(message):
        return dict(message), None
    for key in REFUSED.keys() & message.keys():
        if message[key] is not None:
            raise ValueError(f"a message has {key!r}: {REFUSED[key]}")
    marks = {key: _value(key, message[key]) for key in MARKS if message.get(key) is not None}
    weights = set(marks.values())
    if len(weights) > 1 and (0 in weights or len(weights - {1}) > 1):  # "train: true" and a weight go together
        said = ", ".join(f"{key} {message[key]!r}" for key in marks)
        raise ValueError(f"a message has marks that contradict each other ({said}): keep one mark")
    plain = {key: value for key, value in message.items() if key not in MARKS and key not in REFUSED}
    return plain, next(iter(sorted(weights, key=lambda weight: weight == 1)), None)


def _value(key: str, mark: Any) -> float:
    if MARKS[key] is MASKED:
        if mark not in (0, 1):
            raise ValueError(f"a message has {key} {mark!r:.40}: it is masked (1 or true) or not (0 or false)")
        return float(not mark)
    if not isinstance(mark, bool | int | float) or not 0 <= mark < math.inf:
        raise ValueError(f"a message has {key} {mark!r:.40}: it is true, false or a weight, a number of at least 0")
    return float(mark)
