"""A failure keeps what it knows on its way between processes."""

import pickle

from rollout.errors import EpisodeFailed


def test_a_failure_crosses_processes_whole() -> None:
    failed = pickle.loads(pickle.dumps(EpisodeFailed("the judge is down", retryable=True)))
    assert (failed.reason, failed.retryable, str(failed)) == ("the judge is down", True, "the judge is down")
