"""What follows a turn, found with a short history in place of a long conversation, where that is proven to be the same.

A short history (`rollout.chat.outline`) is relied on once it gave the tokens of the whole conversation for the same
kinds of units, new messages and stop token, in a conversation at least a quarter as long. One difference, and the
template gets whole conversations from then on.

Invariants (tests): the tokens are those of the whole conversation; what is rendered for a turn does not grow with the
number of turns, once such a conversation was played.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from rollout.chat.messages import Message
from rollout.chat.outline import Outline, branch_texts

MAX_CASES = 4096
FURTHER = 4  # times the messages of a comparison, up to which it holds
Following = Callable[[Sequence[Message]], list[int] | None]


class ShortHistories:
    """Comparisons of one chat template so far: the most messages for which a short history gave the same, by kind."""

    def __init__(self, source: Any, options: Mapping[str, Any]) -> None:
        numbers = any(type(value) in (int, float) for value in options.values())
        self._texts = branch_texts(source) if isinstance(source, str) and not numbers else None
        self._proven: dict[Hashable, int] = {}

    def outline(self) -> Outline | None:
        """Return the outline of an empty conversation; None where all has to be rendered."""
        return None if self._texts is None else Outline(self._texts)

    def follow(
        self,
        following: Following,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        outline: Outline | None,
        settings: Hashable,
    ) -> list[int] | None:
        """Return `following(messages)`; what it gives depends on the new messages and on `settings` besides.

        `outline` is that of the messages or of the first of them, and gets the rest; None is one without any.
        """
        if self._texts is None:
            return following(messages)
        outline = outline or Outline(self._texts)
        outline.extend(messages[outline.count :])
        kept = outline.kept(new_messages)
        if kept is None:
            return following(messages)
        units, kind = kept
        short = outline.select(messages, units)
        case = (kind, settings)
        if len(messages) <= FURTHER * self._proven.get(case, 0):
            return following(short)
        whole = following(messages)
        try:
            equal = following(short) == whole
        except ValueError:  # the template refuses the short history
            equal = False
        if not equal:
            self._texts = None
        if len(self._proven) >= MAX_CASES:
            self._proven.clear()
        self._proven[case] = len(messages)
        return whole
