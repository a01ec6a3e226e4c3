"""When sampler, trainer and weights were busy, for the report's picture."""

import json
import time
from pathlib import Path
from typing import Any

TIMELINE = "timeline.jsonl"
"""File in a run's folder; `runlog` draws it."""


class Timeline:
    """Appends spans to the run folder's file; `add` may be called by any thread. Times are of `time.perf_counter()`.

    `done`: steps of the checkpoint that the run goes on from; what the file says of later ones is undone.
    """

    def __init__(self, run_dir: Path, done: int) -> None:
        self._path = run_dir / TIMELINE
        self._clock = time.time() - time.perf_counter()
        self._write({"start": done})

    def add(self, lane: str, kind: str, begin: float, end: float) -> None:
        """Append one span of one lane."""
        times = {"begin": round(begin + self._clock, 4), "end": round(end + self._clock, 4)}
        self._write({"lane": lane, "kind": kind, **times})

    def _write(self, row: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


class SamplerLane:
    """The sampler's spans: from when something is sampled until nothing is, and between two times that it was held.

    Its owner has one thread in it at a time.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._since: float | None = None

    def runs(self) -> None:
        """Start a span, where nothing was sampled."""
        if self._since is None:
            self._since = time.perf_counter()

    def rests(self) -> None:
        """End the span: nothing is sampled any more."""
        self._cut(time.perf_counter())
        self._since = None

    def held(self, begin: float, end: float) -> None:
        """Cut the span where sampling was held for new weights."""
        if self._since is not None:
            self._cut(begin)
            self._since = max(self._since, end)

    def _cut(self, end: float) -> None:
        if self._since is not None and end > self._since:
            self._timeline.add("sampler", "sample", self._since, end)
