"""The process that samples beside the trainer, and another one in its place whenever it dies."""

import warnings
from collections.abc import Callable

from rollout.workers.placement import NoCapacity
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers

RESTARTS = 3
"""Deaths that may follow one another without a group between them."""


def restart(lost: BaseException | None, start: Callable[[], Workers]) -> Workers:
    """Return what `start` starts, in place of samplers of which `lost` says what became of them.

    Raises:
        NoCapacity: there is none, as the cluster has lost their node; the text names it and how the run goes on.
    """
    try:
        return start()
    except NoCapacity as error:
        raise NoCapacity(
            f"{lost or 'the samplers died'}, and no others can take over: {error}; then the run goes on from its "
            "last checkpoint with --resume"
        ) from error


class SamplingProcess:
    """Has the trainer's present weights under the number `version`: they are no older than what they are called.

    `start(version)` begins a process from the run's first weights, which count as that number; `give(worker, version)`
    hands one the present weights, and raises RuntimeError where it does not take them. One that lives and did not take
    them counts as dead: whether it has the old weights, the new ones or some of each, nobody knows.
    """

    def __init__(
        self, start: Callable[[int], Workers], give: Callable[[Workers, int], object], version: int = 0
    ) -> None:
        self._start, self._give = start, give
        self._worker: Workers | None = None
        self._closed: Workers | None = None
        self._deaths = 0
        self._first: BaseException | None = None  # what the deaths that are counted began with
        self._failed: BaseException | None = None  # what a process that was ended here had done
        self.version = version

    @property
    def worker(self) -> Workers:
        """The process, dead or alive."""
        assert self._worker is not None
        return self._worker

    def begin(self) -> None:
        """Start the first one. WorkerDied: it could not even begin, as no other would."""
        self._worker = self._start(max(0, self.version - 1))
        self.push(self.version)

    def push(self, version: int) -> None:
        """Give it the present weights as number `version`; where it dies of it, another one has them."""
        self.version = version
        try:
            self._sync()
        except WorkerDied:
            self.replace_if_dead()

    def replace_if_dead(self, died: Callable[[], object] = lambda: None) -> Workers:
        """Return the process; one that died is replaced, and `died` called, also where it dies before it has its
        weights.

        Raises:
            RuntimeError: more than `RESTARTS` died in a row.
            NoCapacity: see `restart`.
        """
        lost = self._failed or self.worker.why
        while not self.worker.alive:
            self._deaths += 1
            self._first = self._first or lost
            if self._deaths > RESTARTS:
                raise RuntimeError(
                    f"the sampling process died {self._deaths} times in a row: see its messages above; the first time "
                    f"{self._first or 'without a word'}"
                ) from self._first
            self.close()
            died()
            try:
                self._worker = restart(lost, lambda: self._start(max(0, self.version - 1)))
                self._failed = None
                self._sync()
            except WorkerDied as error:
                lost = error
        return self.worker

    def works(self) -> None:
        """Note that it finished a group: deaths are counted from here."""
        self._deaths, self._first = 0, None

    def fail(self, error: BaseException) -> None:
        """End it, where it lives: it did not take weights, and `error` says why. `replace_if_dead` replaces it."""
        if self.worker.alive:
            warnings.warn(f"the sampling process is replaced: {error}", RuntimeWarning, stacklevel=2)
            self._failed = error
            self.close()

    def close(self) -> None:
        """End it, once; nothing where there is none."""
        if self._worker is not None and self._worker is not self._closed:
            self._worker.close()
            self._closed = self._worker

    def _sync(self) -> None:
        """Send it the weights; raise WorkerDied where it ended before it had them, or was ended for not taking them."""
        if not self.version:
            return
        try:
            self._give(self.worker, self.version)
        except RuntimeError as error:
            self.fail(error)
            raise WorkerDied(str(error)) from error
