"""What the apps are called where they run: targets of Bazel in the checkout, commands where they are installed."""

INSTALLED = __name__.startswith("tessera_apps.")
"""Whether this is the wheel of `tessera-apps`, in which the apps have another package's name (apps/hatch_build.py)."""


def program(app: str) -> str:
    """Return the name of an app in its help: "grpo", or "tessera-grpo" where it is installed."""
    return f"tessera-{app}" if INSTALLED else app


def command(app: str) -> str:
    """Return the words that start an app, before its flags."""
    return f"tessera-{app}" if INSTALLED else f"./bazelw run //apps/{app} --"
