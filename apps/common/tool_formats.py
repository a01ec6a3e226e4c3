"""Formats of tool calls by name, or a user's own: `--tool-format FILE.py:NAME`."""

from collections.abc import Sequence

from chat_tools import Format, find_format
from seqpack.extensions.load_object import is_user_code, load_object
from seqpack.extensions.options import bound


def format_of(name: str, options: Sequence[str] = ()) -> Format:
    """Return the format of a name, or the `chat_tools.Format` that FILE.py:NAME or package.module:NAME is, or makes.

    Raises:
        ValueError: there is none, or it takes other options.
    """
    if not is_user_code(name):
        if options:
            raise ValueError(f"--tool-format-options {options[0]} has no effect: the format {name!r} has no options")
        return find_format(name)
    made = load_object(name, "tool-format")
    if not isinstance(made, Format) and callable(made):
        made = bound("--tool-format-options", name, made, options)()
    elif options:
        raise ValueError(f"--tool-format-options {options[0]} has no effect: {name} is a Format, and no function")
    if not isinstance(made, Format):
        raise ValueError(f"--tool-format {name} is a {type(made).__name__}: a chat_tools.Format is needed")
    return made
