"""Messages about extras to install, for parts of this library that need more than the library does."""


def missing_extra_message(need: str, extra: str) -> str:
    """Return the text of an error: what is needed, and the extra that installs it, also from a checkout of the tree."""
    return f"{need}: pip install 'tessera-engines[{extra}]' (of a checkout './libs/engines[{extra}]')"
