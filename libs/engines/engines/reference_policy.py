"""The policy that training leaves as it was, to which a KL penalty holds the one that is trained.

It is a frozen engine beside the trained one, or the base under an adapter, which costs no second model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.protocol import TrainEngine


@contextmanager
def base_policy(engine: Any) -> Iterator[TrainEngine]:
    """While it is open, what it yields scores by the reference policy: `engine.reference`, or `engine` by its base.

    ValueError where the engine has neither.
    """
    if engine.reference is not None:
        yield engine.reference
        return
    with engine.executor.without_adapters():
        yield engine
