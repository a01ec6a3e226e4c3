"""Import of packages that are slow to load."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python's cycle collector from running while packages are imported, and from scanning them later.

    They make a million objects that stay, and the collector walks all of them several times: a fifth of the imports.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
