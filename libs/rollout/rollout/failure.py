"""The one exception that says: this episode can't be scored, and that is not the model's doing."""


class EpisodeFailed(Exception):  # noqa: N818  it names the event, as CancelledError's kin do
    """An episode broke: its environment, a tool's backend or its reward is down. It is never a reward of zero.

    `retryable` says whether the same task may be played again (a worker was lost, a limit was hit) or would break again
    (a reward that isn't a number).
    """

    def __init__(self, reason: str, retryable: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retryable = retryable

    def __reduce__(self) -> tuple[type["EpisodeFailed"], tuple[str, bool]]:  # crosses processes whole
        return type(self), (self.reason, self.retryable)
