"""What was worked out once of messages, tools and tokens: the episodes of a group often say the same."""

import json
from collections.abc import Callable
from typing import Any, Generic, TypeVar

LONG = 4096  # characters of a key: what follows a long conversation comes but once
T = TypeVar("T")


class Repeated(Generic[T]):
    """Results of a pure function of plain data, the newest `most` of them. Results are shared: leave them as they
    are."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.known: dict[str, T] = {}

    def of(self, key: Any, make: Callable[[], T]) -> T:
        """Return `make()`, or what it gave for an equal key. Long keys and values that JSON lacks are not kept."""
        try:
            text = json.dumps(key)
        except TypeError:
            return make()
        if len(text) > LONG:
            return make()
        if text not in self.known:
            made = make()
            for oldest in list(self.known)[: len(self.known) - self.most + 1]:  # several threads may be here
                self.known.pop(oldest, None)
            return self.known.setdefault(text, made)
        return self.known[text]
