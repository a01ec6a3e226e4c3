"""The text of a turn while its tokens come: whole characters, up to a stop text.

1. Tokens are decoded in a window that begins at a whole character; a last half character waits for the next token.
2. Text that may be the beginning of a stop text waits for more tokens.
3. The turn ends with the fewest tokens whose text holds a stop text: later tokens are dropped.

Invariants (tests): however the tokens are cut, the pieces add up to the same text, and `kept` is the same.
"""

from collections.abc import Callable, Collection, Sequence

HALF = "\ufffd"  # decoded from bytes that are no whole character

Decode = Callable[[Sequence[int]], str]


class TurnDetokenizer:
    """Decoder of the ids of one turn as they are sampled. `stop_ids` end a turn and are no text of it.

    `kept` is None until a stop text is complete, then the number of the turn's first tokens that stay.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), stop_ids: Collection[int] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._stop_ids = frozenset(stop_ids)
        self._longest = max(map(len, self._stops), default=0)
        self._window = self._read = 0  # ids before `_read` are text; decoding begins at `_window`
        self._given = 0  # characters that were returned
        self.ids: list[int] = []
        self.text = ""
        self.kept: int | None = None

    def feed(self, ids: Sequence[int]) -> str:
        """Append ids and return the text that is certain now; text after a stop text is skipped."""
        self.ids += ids
        return self._advance(final=False)

    def finish(self) -> str:
        """Return the text that still waited: no tokens follow."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self.kept is not None:
            return ""
        ids = self.ids[self._window :]
        if ids and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        known = self._decode(ids[: self._read - self._window]) if self._read > self._window else ""
        text = self._decode(ids) if ids else ""
        before = len(self.text)
        if final or not text.endswith(HALF):
            self.text += text[len(known) :]
            if text[len(known) :]:
                self._window, self._read = self._read, self._window + len(ids)
        if (end := self._stop_from(max(0, before - self._longest + 1))) is None:
            end = len(self.text) - (0 if final else self._waiting())
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _stop_from(self, start: int) -> int | None:
        """Return where a stop text at or after `start` ends the text, or None; then set `kept` and `text`."""
        if not any(self.text.find(stop, start) >= 0 for stop in self._stops):
            return None
        self.kept = min_tokens_with(self._decode, self.ids, self._stops)
        text = self._decode(self.ids[: self.kept])
        end = min(at for at in map(text.find, self._stops) if at >= 0)
        self.text = text[:end]
        return end

    def _waiting(self) -> int:
        """Return how many of the last characters may begin a stop text."""
        for count in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-count:]) for stop in self._stops):
                return count
        return 0


def min_tokens_with(decode: Decode, ids: Sequence[int], stops: Sequence[str]) -> int:
    """Return the fewest tokens whose text holds a stop text, by bisection: longer beginnings hold it too."""
    low, high = 1, len(ids)
    while low < high:
        middle = (low + high) // 2
        if any(stop in decode(ids[:middle]) for stop in stops):
            high = middle
        else:
            low = middle + 1
    return low
