"""Start of a sampler beside the training engine: begun before the engine is built, waited for before its first use."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol, TypeVar

from rollout.workers.protocol import Workers
from schedules.protocols import StartingEngine, Tasks
from schedules.runtime.collectives import broadcast_result, rank_and_world
from schedules.sampling.numbered_tasks import NumberedRows
from schedules.sampling.sampler_process import StartSampling, Wait, wait_until_ready
from schedules.sampling.settings import RolloutSettings

R = TypeVar("R")
T = TypeVar("T")


class BeginSampling(StartSampling, Protocol):
    """Starter whose samplers can begin before they are waited for."""

    def begin(self, version: int, place: Mapping[str, Any] | None) -> Workers:
        """Begin to start samplers as a call does, and return them before they are ready; to be closed."""
        ...


def begin_early(start: BeginSampling, tasks: Tasks, stack: ExitStack, early: bool) -> StartSampling:
    """Return a fully asynchronous run's starter of samplers, which begins them now where that is `early`.

    Rank 0 has them. The stack closes those that nobody called for.
    """
    return stack.enter_context(EarlyStart(start, tasks)) if early and not rank_and_world()[0] else start


class EarlyStart:
    """Starter of a fully asynchronous run's samplers (`StartSampling`), which begins the first ones at once.

    They count as version 0 and begin with the tasks' present place. A first call that asks for others starts those
    instead. `close` ends what was begun and never called for.
    """

    def __init__(self, start: BeginSampling, tasks: Tasks) -> None:
        self._start = start
        self._place = NumberedRows(tasks, start.settings.prompts_per_step).place(0)
        self._begun: Workers | None = start.begin(0, self._place)

    def __enter__(self) -> "EarlyStart":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def settings(self) -> RolloutSettings:
        """Prompts of a step and limits of their episodes."""
        return self._start.settings

    @property
    def module_names(self) -> bool:
        """Whether they take weights under the names of the trained module."""
        return self._start.module_names

    def begin(self, version: int, place: Mapping[str, Any] | None) -> Workers:
        """Return the samplers that have begun where they are what is asked for, else begin others."""
        begun, self._begun = self._begun, None
        if begun is not None and (version, place) == (0, self._place):
            return begun
        if begun is not None:
            begun.close()
        return self._start.begin(version, place)

    def __call__(self, version: int, place: Mapping[str, Any] | None, wait: Wait) -> Workers:
        """Return samplers once they are ready; see `StartSampling`."""
        return wait_until_ready(self.begin(version, place), wait)

    def close(self) -> None:
        """End the samplers that have begun, where nobody has called for them."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()


def build_beside(
    sampler: object, read: Callable[[], R], build: Callable[[R | None], T], ready: Callable[[], object], shares: bool
) -> T:
    """Return what trains, built while the sampler starts; `ready` is called once the sampler can be asked. Collective.

    Args:
        sampler: what samples; one that is no `StartingEngine` can be asked already.
        read: does what training needs no device for, while the sampler starts.
        build: builds on the device, from what `read` returned; None where the sampler can be asked already.
        ready: called with the sampler ready.
        shares: whether both take memory of one device. The sampler measures what is free there while it starts, so all
            ranks wait for it before they build.
    """
    starting = sampler if isinstance(sampler, StartingEngine) else None
    with _named(starting, "training could not be built; the sampler, which was starting, is ended"):
        found = None if starting is None else read()
        built = None if shares else [build(found)]
    with _named(starting, "the sampler could not start"):
        if starting is not None:
            starting.wait_until_ready()
        ready()
    if built is not None:
        return built[0]
    broadcast_result(None)
    with _named(starting, "training could not be built; the sampler is ended"):
        return build(found)


@contextmanager
def _named(starting: StartingEngine | None, note: str) -> Iterator[None]:
    """Add a note to an error of the block, where a sampler is starting beside it."""
    try:
        yield
    except (ValueError, RuntimeError, OSError) as error:
        if starting is not None:
            error.add_note(note)
        raise
