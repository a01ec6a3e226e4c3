"""What a run tells people: metrics, episodes, live progress, a summary table and one HTML report."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from runlog.display import Progress as Progress
    from runlog.display import summary_table as summary_table
    from runlog.report import write_report as write_report
    from runlog.run import RunLog as RunLog
    from runlog.store import read_episodes as read_episodes
    from runlog.store import read_metrics as read_metrics
    from runlog.trackers import TRACKERS as TRACKERS
    from runlog.trackers import check_tracker as check_tracker
    from runlog.trackers import start_tracker as start_tracker

_EXPORTS = {
    "Progress": "runlog.display",
    "RunLog": "runlog.run",
    "TRACKERS": "runlog.trackers",
    "check_tracker": "runlog.trackers",
    "read_episodes": "runlog.store",
    "read_metrics": "runlog.store",
    "start_tracker": "runlog.trackers",
    "summary_table": "runlog.display",
    "write_report": "runlog.report",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
