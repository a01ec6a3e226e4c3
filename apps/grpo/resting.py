"""What training alone needs leaves the device while answers are sampled."""

from collections.abc import Iterator
from contextlib import contextmanager

from engines import TrainEngine


@contextmanager
def resting(engine: TrainEngine, offload: bool) -> Iterator[None]:
    """Keep the engine, and the frozen one beside it, in host memory while this is open; nothing where not asked to.

    Collective, as moving them is. An engine that was moved comes back where sampling fails too.
    """
    moved: list[TrainEngine] = []
    try:
        for one in (engine, engine.reference) if offload else ():
            if one is not None:
                moved.append(one)
                one.offload()
        yield
    finally:
        for one in moved:
            one.onload()
