"""A streaming packer: samples of any iterable come out as the rows of an iterable dataset."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from seqpack.adapters.worker_events import WorkerEvents
from seqpack.planning.checks import check_positive_int
from seqpack.planning.packing import pack
from seqpack.planning.padding import aligned_length, frozen_bucket, usable_capacity

Sample = Mapping[str, Any]


class PackedStream(IterableDataset[list[Sample]]):
    """An iterable dataset that packs samples as they come; each item is the list of samples of one row.

        DataLoader(PackedStream(source, max_tokens), batch_size=None, collate_fn=PackedCollator())

    Strategy
    1. Samples (mappings with `input_ids`) are read until `lookahead` rows' worth of tokens wait.
    2. `seqpack.pack` plans what waits; its rows are given, the oldest sample's first, but the emptiest of those without
       a sample that waited before: no sample waits for more than two plans.
    3. At the end of the source all that waits is given, the last row perhaps not full.

    Ranks and workers. `shard="rows"`: every one reads the whole source and takes each row whose turn is its own: all
    ranks have the same number of rows (the last incomplete step is left out, `dropped` says how many samples), and the
    rows of a rank do not depend on how many workers there are. `shard="samples"`: every one reads each n-th sample and
    packs these alone, which costs less reading; ranks may then differ in their number of rows. A source that is sharded
    already takes `world_size=1`.

    State. `state_dict` holds the settings, what waits and how far the source was read; a source that has `state_dict`
    and `load_state_dict` of its own is asked, any other is read again up to there. Workers keep their states to
    themselves: under a plain DataLoader that has some, `state_dict` is refused here; load `{"rows": n}` with the number
    of rows that this rank trained, and the stream is packed anew up to there (`shard="rows"`). Each loaded state holds
    for the next iteration alone, and with "rows" for any rank.

    ValueError for a sample over the cap (cut it or leave it out in the source), for a rank that gets no row at all, and
    for a state of other settings.
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
        self.usable = usable_capacity(self.max_tokens, align, bucket)
        self._loaded: dict[str, Any] | None = None
        self._packer: _Packer | None = None
        self._rows = self._phase = 0
        self._news = WorkerEvents()

    @property
    def dropped(self) -> int:
        """Number of samples that the last whole iteration left out at its end, over all ranks."""
        return self._news.dropped

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that the rows depend on, as plain data. With shard="rows" a state holds for any rank."""
        bucket = list(self.bucket) if isinstance(self.bucket, tuple) else self.bucket
        shared = {"max_tokens": self.max_tokens, "align": self.align, "bucket": bucket, "lookahead": self.lookahead}
        own = {"rank": self.rank} if self.shard == "samples" else {}
        return {**shared, "world_size": self.world_size, "shard": self.shard, **own}

    def __iter__(self) -> Iterator[list[Sample]]:
        """Yield this rank's (and worker's) rows; after a loaded state, the rows that follow it."""
        worker = get_worker_info()
        index, count = (worker.id, worker.num_workers) if worker else (0, 1)
        state, self._loaded = self._news.state_for(worker, self._loaded), None
        whole = self.shard == "rows"
        if not whole and count > 1 and state and "taken" not in state:
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
        self._news.dropped = sum(map(len, step))
        if number < first:
            raise ValueError(f"the state is after row {first} of this rank, the source gives it {number} rows")
        if number == 0 and "taken" not in state and (whole or index == 0):
            what = f"{packer.taken} samples in {len(step)} rows" if whole else f"{packer.taken} samples"
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
        self.stream, self.part = stream, part
        self.taken: int = state.get("taken", 0)
        self.rows: int = state.get("rows", 0)
        self.waiting: list[Sample] = list(state.get("waiting", ()))
        self.ready: deque[list[Sample]] = deque(map(list, state.get("ready", ())))
        self.carried: int = state.get("carried", 0)
        self.ended: bool = state.get("ended", False)
        if "source" in state:
            stream.source.load_state_dict(state["source"])  # type: ignore[attr-defined]
            self.samples = iter(stream.source)
        else:
            self.samples = islice(iter(stream.source), self.taken, None)

    def state(self) -> dict[str, Any]:
        """Return a state to resume from: how much was read, waiting samples, and planned rows that were not yielded."""
        state = {"taken": self.taken, "waiting": list(self.waiting), "carried": self.carried}
        state["ended"] = self.ended
        state["ready"] = [list(row) for row in self.ready]
        if hasattr(self.stream.source, "state_dict") and hasattr(self.stream.source, "load_state_dict"):
            state["source"] = self.stream.source.state_dict()
        return state

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
        wanted = self.stream.lookahead * self.stream.usable
        tokens = sum(map(self._size, self.waiting))
        while tokens < wanted and not self.ended:
            sample = next(self.samples, None)
            if sample is None:
                self.ended = True
                return
            self.taken += 1
            if not isinstance(sample, Mapping) or sample.get("input_ids") is None:
                contents = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
                raise ValueError(f"sample {self.taken - 1} of the source has no input_ids, only {contents}")
            if (self.taken - 1) % self.part.step != self.part.first:
                continue
            size = self._size(sample)
            if not 0 < size <= self.stream.usable:
                raise ValueError(
                    f"sample {self.taken - 1} of the source has {size} tokens (aligned), a row holds "
                    f"1..{self.stream.usable}: cut it, leave it out, or raise max_tokens"
                )
            self.waiting.append(sample)
            tokens += size

    def _plan(self) -> None:
        """Plan rows of the waiting samples; the emptiest row of new samples alone keeps waiting."""
        sizes = [self._size(sample) for sample in self.waiting]
        rows = sorted(tuple(sorted(row)) for row in pack(sizes, self.stream.usable).bins) if sizes else []
        fresh = [row for row in rows if row[0] >= self.carried]
        carried: tuple[int, ...] = ()
        if not self.ended and len(rows) > 1 and fresh:
            carried = min(fresh, key=lambda row: (sum(sizes[i] for i in row), -row[0]))
        self.ready.extend([self.waiting[i] for i in row] for row in rows if row != carried)
        self.waiting = [self.waiting[i] for i in carried]
        self.carried = len(carried)

    def _size(self, sample: Sample) -> int:
        return aligned_length(len(sample["input_ids"]), self.stream.align)
