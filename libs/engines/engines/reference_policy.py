"""The reference model, which training leaves as it is, and to which a KL penalty holds the policy.

It is a frozen engine beside the trained one, or the base under an adapter, which costs no second model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engines.protocol import TrainEngine


@contextmanager
def base_policy(engine: Any) -> Iterator[TrainEngine]:
    """Yield an engine that scores by the reference model inside the block: `engine.reference`, or `engine` by its base.

    ValueError where the engine has neither.
    """
    if engine.reference is not None:
        yield engine.reference
        return
    with engine.executor.without_adapters():
        yield engine
