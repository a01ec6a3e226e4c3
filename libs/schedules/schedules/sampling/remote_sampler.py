"""Stand-in of a rank whose sampler is another rank's."""

from rollout.engine import Load, PauseMode
from rollout.sync import Manifest
from rollout.sync.pieces import Bucket


class RemoteSampler:
    """Version of the weights of a sampler that another rank has.

    It takes no weights, and no task is dealt to it (`RolloutSession`).
    """

    takes_weights = False
    """Of shards none are sent here (`schedules.weights.shard_buckets`)."""

    def __init__(self, version: int) -> None:
        self.version = self._before = version

    def load(self) -> Load:
        """Return an empty load: nothing runs here."""
        return Load(0, 0)

    async def prepare(self, manifest: Manifest) -> None:
        """Note the version in use; nothing is staged."""
        del manifest
        self._before = self.version

    async def receive(self, bucket: Bucket) -> int:
        """Return 0: nothing lacks."""
        del bucket
        return 0

    async def commit(self, version: int) -> None:
        """Note the version that the sampler now has."""
        self.version = version

    async def abort(self) -> None:
        """Restore the version from before."""
        self.version = self._before

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Do nothing: nothing runs."""
        del mode

    async def resume(self) -> None:
        """Let the version from before go."""
        self._before = self.version
