"""What to install for a part of this library that needs an extra."""


def missing_extra_message(need: str, extra: str) -> str:
    """Return the text of an error: what is needed and the extra that brings it, also from a checkout."""
    return f"{need}: pip install 'tessera-rollout[{extra}]' (of a checkout './libs/rollout[{extra}]')"
