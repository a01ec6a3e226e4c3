"""Training and sampling take turns with the memory of a device that they share."""

from collections.abc import Iterator
from contextlib import contextmanager

from apps.common.run.ranks import all_ranks
from apps.grpo.sampling.session import Session
from engines import TrainEngine
from rollout import VllmEngine


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


@contextmanager
def sampling_turn(session: Session, engine: TrainEngine) -> Iterator[None]:
    """Sample while this is open, as the settings of the cluster say who gives memory back meanwhile; collective.

    With `rollout.sleep` vLLM is awake only here: it takes its memory once every rank has left its own, whose devices it
    may span, and no rank takes that again before every vLLM sleeps.
    """
    cluster = session.config.cluster
    with resting(engine, cluster.offload):
        if not cluster.rollout.sleep:
            yield
            return
        vllm = session.sampler if isinstance(session.sampler, VllmEngine) else None
        all_ranks(True)
        if vllm is not None:
            session.runner.run(vllm.wake())
        yield
        if vllm is not None:
            session.runner.run(vllm.sleep())
        all_ranks(True)
