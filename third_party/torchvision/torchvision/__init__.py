"""Stands where torchvision would, for a process that imports code for images and never sees one.

The package registries' torchvision is built for CUDA and does not load beside a CPU build of torch; transformers imports
names of it at the top of its image processors, and vLLM those for every Qwen model. What is used of it fails by name.
"""

__version__ = "0.28.0"  # the one that belongs to the torch of the lock; transformers compares it


def missing(module: str, name: str) -> object:
    """Return an attribute of a module: dunders are not there, anything else raises when it is called."""
    if name.startswith("__"):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    return Missing(f"{module}.{name}")


class Missing:
    """A name of torchvision that may be imported and not be used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "Missing":
        return Missing(f"{self._name}.{name}")

    def __call__(self, *arguments: object, **named: object) -> None:
        raise RuntimeError(
            f"{self._name} was called, but this environment has no torchvision: images need a build of it for its torch"
        )


def __getattr__(name: str) -> object:
    return missing(__name__, name)
