"""Words NAME=VALUE of a command line as a dictionary."""

import json
from collections.abc import Sequence
from typing import Any


def named_values(flag: str, words: Sequence[str], example: str) -> dict[str, Any]:
    """Return the NAME=VALUE words of `flag` as a dictionary; a value that is JSON is read as such (true, 3, "text").

    Raises:
        ValueError: a word has another shape than `example`, or a name comes twice.
    """
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{flag} {word!r} is not NAME=VALUE, such as {example}")
        if name in values:
            raise ValueError(f"{flag} names {name} twice")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values
