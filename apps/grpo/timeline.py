"""When sampler, trainer and weights were busy, for the report's picture."""

import json
import time
from pathlib import Path

from runlog.timeline import TIMELINE


class Timeline:
    """Appends spans to the run folder's file; `add` may be called by any thread. Times are of `time.perf_counter()`."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / TIMELINE
        self._clock = time.time() - time.perf_counter()

    def add(self, lane: str, kind: str, begin: float, end: float) -> None:
        """One span of one lane."""
        span = {"lane": lane, "kind": kind, "begin": round(begin + self._clock, 4), "end": round(end + self._clock, 4)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(span) + "\n")
