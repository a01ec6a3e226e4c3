"""Words NAME=VALUE of a command line as a dictionary."""

import json
from collections.abc import Sequence
from typing import Any


def named_values(flag: str, words: Sequence[str], example: str) -> dict[str, Any]:
    """Return the words of `flag` by name; a value that is JSON is read as such (true, 3, "text"), any other is text.

    Raises:
        ValueError: a word has another shape than `example`, or a name comes twice.
    """
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{flag} {word!r} is not NAME=VALUE, such as {example}")
        if name in found:
            raise ValueError(f"{flag} names {name} twice")
        try:
            found[name] = json.loads(text)
        except json.JSONDecodeError:
            found[name] = text
    return found
