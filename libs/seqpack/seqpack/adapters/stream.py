"""A streaming packer: samples of any iterable come out as the rows of an iterable dataset."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from seqpack.adapters.collator import Sample
from seqpack.adapters.foreign_sources import check_not_split
from seqpack.adapters.stream_reader import Empty, Limits, Overlong, SourceReader
from seqpack.adapters.worker_events import StreamCounts, WorkerEvents
from seqpack.planning.checks import check_positive_int
from seqpack.planning.packing import pack
from seqpack.planning.padding import frozen_bucket, usable_capacity


class PackedStream(IterableDataset[list[Sample]]):
    """An iterable dataset that packs samples as they come; each item is the list of samples of one row.

        DataLoader(PackedStream(source, max_tokens), batch_size=None, collate_fn=PackedCollator())

    Strategy
    1. Samples (mappings with `input_ids`) are read until `lookahead` rows' worth of tokens wait.
    2. `seqpack.pack` plans what waits; its rows are given, the oldest sample's first, but the emptiest of those without
       a sample that waited before: no sample waits for more than two plans.
    3. At the end of the source all that waits is given, the last row perhaps not full.

    Ranks and workers. The stream alone divides the samples: while it reads, `get_worker_info` is None, so that a source
    which divides itself among workers (as Hugging Face's do) gives everything to each. `shard="rows"`: each rank and
    worker takes the rows whose turn is its own: all ranks have the same number of rows (the last incomplete step is
    left out), and the rows of a rank do not depend on how many workers there are. `shard="samples"`: each takes every
    n-th sample and packs these alone; ranks may then differ in their number of rows. All must read the source in the
    same order: workers compare what they read; for ranks fix the seed (`shuffle(seed=...)`). A source that is split by
    rank already takes `world_size=1`.

    Samples over the cap or empty are an error, or left out, or cut (`overlong`, `empty`); `counts` says how many.

    State. `state_dict` holds the settings, what waits and how far the source was read. A source with an exact state of
    its own goes on from it; any other (a shuffle buffer too) is read again up to there, and must give the same samples.
    Workers keep their states to themselves: under a plain DataLoader that has some, `state_dict` is refused here; load
    `{"rows": n}` with the number of rows that this rank trained, and the stream is packed anew up to there
    (`shard="rows"`). Each loaded state holds for the next iteration alone, and with "rows" for any rank.

    ValueError for a rank that gets no row at all, and for a state of other settings or of another order of the source.
    """

    def __init__(
        self,
        source: Iterable[Sample],
        max_tokens: int,
        *,
        lookahead: int = 32,
        rank: int = 0,
        world_size: int = 1,
        shard: Literal["rows", "samples"] = "rows",
        align: int = 1,
        bucket: int | Sequence[int] | None = None,
        overlong: Overlong = "error",
        empty: Empty = "error",
    ) -> None:
        super().__init__()
        self.source = source
        self.max_tokens = check_positive_int(max_tokens, "max_tokens")
        self.lookahead = check_positive_int(lookahead, "lookahead")
        self.world_size = check_positive_int(world_size, "world_size")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        if shard not in ("rows", "samples"):
            raise ValueError(f"shard must be 'rows' or 'samples', got {shard!r}")
        self.rank, self.shard = rank, shard
        self.align, self.bucket = check_positive_int(align, "align"), frozen_bucket(bucket)
        self.limits = Limits(usable_capacity(self.max_tokens, align, bucket), align, overlong, empty)
        check_not_split(source, self.world_size)
        self._loaded: dict[str, Any] | None = None
        self._packer: _Packer | None = None
        self._rows = self._phase = 0
        self._news = WorkerEvents()

    @property
    def counts(self) -> StreamCounts:
        """Numbers of samples that the running or last iteration left out or cut so far, by reason."""
        return self._news.counts

    @property
    def dropped(self) -> int:
        """Number of samples that the running or last iteration left out so far, over all ranks and workers."""
        return sum(self.counts) - self.counts.truncated

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the source, by which its order is drawn, where it has one; trainers call this."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the rows depend on, as plain data. With shard="rows" a state holds for any rank."""
        bucket = list(self.bucket) if isinstance(self.bucket, tuple) else self.bucket
        shared: dict[str, Any] = {"max_tokens": self.max_tokens, "align": self.align, "bucket": bucket}
        shared |= {"lookahead": self.lookahead, "overlong": self.limits.overlong, "empty": self.limits.empty}
        own = {"rank": self.rank} if self.shard == "samples" else {}
        return {**shared, "world_size": self.world_size, "shard": self.shard, **own}

    def __iter__(self) -> Iterator[list[Sample]]:
        """Yield this rank's (and worker's) rows; after a loaded state, the rows that follow it."""
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker else (0, 1)
        state, self._loaded = self._news.state_for(worker, self._loaded), None
        whole = self.shard == "rows"
        if not whole and count > 1 and state.get("rows") and "taken" not in state:
            raise ValueError("with shard='samples' the states of all workers are needed: use a loader that keeps them")
        part = _Part(0, 1) if whole else _Part(self.rank * count + index, self.world_size * count)
        packer = self._packer = _Packer(self, part, state if "taken" in state else {})
        number = self._rows = packer.rows
        start = self._phase = state.get("phase", state.get("rows", 0))
        ranks, own, turns, turn = (self.world_size, self.rank, count, index) if whole else (1, 0, 1, 0)
        first = state.get("rows", 0)
        while len(step := list(islice(packer, ranks))) == ranks:
            number += 1
            packer.rows = number
            if number > first and (number - 1 - start) % turns == turn:
                self._rows = number
                yield step[own]
        self._news.counts = packer.reader.counts._replace(last_step=sum(map(len, step)))
        if number < first:
            raise ValueError(f"the state is after row {first} of this rank, the source gives it {number} rows")
        if number == 0 and "taken" not in state and (whole or index == 0):
            what = f"{packer.reader.taken} samples in {len(step)} rows" if whole else f"{packer.reader.taken} samples"
            raise ValueError(
                f"the source gives rank {self.rank} of {self.world_size} no row ({what}): use fewer ranks, a smaller "
                "max_tokens, or a source that can be iterated again"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the running iteration, or a loaded state that was not used yet.

        ValueError where the workers of a DataLoader iterate and not this process, which does not know their place.
        """
        if get_worker_info() is None and self._news.by_workers:
            raise ValueError(
                "the workers of a DataLoader keep this stream's state: count the rows that are trained and load "
                "{'rows': n}, use num_workers=0, or a loader that asks its workers (torchdata's StatefulDataLoader)"
            )
        if self._packer is None or self._loaded is not None:
            return dict(self._loaded or {"rows": 0, "settings": self.settings})
        place = {"rows": self._rows, "phase": self._phase, "settings": self.settings}
        return {**place, **self._packer.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state in the next iteration; `{"rows": n}` alone packs anew up to row n."""
        rows = state.get("rows")
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 0:
            raise ValueError(
                f"a state of PackedStream has 'rows', how many rows of this rank were trained, not {rows!r}"
            )
        if "taken" in state or "settings" in state:
            self._check_settings(state.get("settings", {}))
        self._loaded = dict(state)
        self._news.forget()

    def _check_settings(self, given: Mapping[str, Any]) -> None:
        """Raise ValueError where a state belongs to a stream with other rows."""
        for name, own in self.settings.items():
            if name not in given or given[name] != own:
                raise ValueError(
                    f"this state is of a stream with {name}={given.get(name)!r}, this one has {own!r}: make the stream "
                    "as it was made then, or begin a new epoch"
                )


class _Part(NamedTuple):
    """Each `step`-th sample of a source, from `first` on."""

    first: int
    step: int


class _Packer:
    """Rows of the samples of one part of a source."""

    def __init__(self, stream: PackedStream, part: _Part, state: Mapping[str, Any]) -> None:
        self.stream, self.part, self.limits = stream, part, stream.limits
        self.rows: int = state.get("rows", 0)
        self.waiting: list[Sample] = list(state.get("waiting", ()))
        self.ready: deque[list[Sample]] = deque(map(list, state.get("ready", ())))
        self.carried: int = state.get("carried", 0)
        self.reader = SourceReader(stream.source, stream.limits, stream._news, state)

    def state(self) -> dict[str, Any]:
        """Return a state to resume from: how much was read, waiting samples, and planned rows that were not yielded."""
        state = {"waiting": list(self.waiting), "carried": self.carried, "ready": [list(row) for row in self.ready]}
        return {**state, **self.reader.state()}

    def __iter__(self) -> Iterator[list[Sample]]:
        """Return the iterator itself, which continues."""
        return self

    def __next__(self) -> list[Sample]:
        """Return the next row."""
        if not self.ready:
            self._read()
            self._plan()
        if not self.ready:
            raise StopIteration
        return self.ready.popleft()

    def _read(self) -> None:
        """Read samples until enough of them wait for a plan, or the source ends."""
        wanted = self.stream.lookahead * self.limits.usable
        tokens = sum(map(self.limits.size, self.waiting))
        while tokens < wanted and (read := self.reader.read()):
            number, sample = read
            if number % self.part.step == self.part.first:
                self.waiting.append(sample)
                tokens += self.limits.size(sample)
        self.stream._news.counts = self.reader.counts

    def _plan(self) -> None:
        """Plan rows of the waiting samples; the emptiest row of new samples alone keeps waiting."""
        sizes = list(map(self.limits.size, self.waiting))
        rows = sorted(tuple(sorted(row)) for row in pack(sizes, self.limits.usable).bins) if sizes else []
        fresh = [row for row in rows if row[0] >= self.carried]
        carried: tuple[int, ...] = ()
        if not self.reader.ended and len(rows) > 1 and fresh:
            carried = min(fresh, key=lambda row: (sum(sizes[i] for i in row), -row[0]))
        self.ready.extend([self.waiting[i] for i in row] for row in rows if row != carried)
        self.waiting = [self.waiting[i] for i in carried]
        self.carried = len(carried)
