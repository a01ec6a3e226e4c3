"""What to install for a part of this library that needs more than the library does."""


def missing_extra_message(need: str, extra: str) -> str:
    """Return an error's text: what is missing, and how to install its extra, also from a checkout of the tree."""
    return f"{need}: pip install 'tessera-chat-tools[{extra}]' (of a checkout './libs/chat_tools[{extra}]')"
