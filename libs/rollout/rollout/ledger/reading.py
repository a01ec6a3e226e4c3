"""The records of a ledger's file (`rollout.ledger.records`), up to its end or its torn tail.

A bad record is torn where no whole one follows it, which may begin at any byte behind it: its length cannot be
believed. Only what could be a record is checked: a kind, a length that fits into the file and belongs to the kind, and
a first number that a run can reach.
"""

import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rollout.ledger.records import HEAD, HEAD_BYTES, NUMBER_BYTES, STARTED_BYTES, Kind

_SEEDS = {int(kind): zlib.crc32(bytes((kind,))) for kind in Kind}
_LEAST = HEAD_BYTES + NUMBER_BYTES
"""Bytes of the shortest record."""
_CHUNK = 1 << 22


def records(data: memoryview, start: int) -> Iterator[tuple[int, int, int]]:
    """Yield the whole records from an offset on: the kind of each, and where its body begins and ends.

    Raises:
        ValueError: a record is damaged and others follow it; the text names its offset.
    """
    at, size = start, len(data)
    seeds, unpack, crc32 = _SEEDS, HEAD.unpack_from, zlib.crc32
    while at + HEAD_BYTES <= size:
        length, crc, kind = unpack(data, at)
        begin = at + HEAD_BYTES
        end = begin + length
        if end > size or kind not in seeds or crc32(data[begin:end], seeds[kind]) != crc:
            if end == size or is_incomplete(data, at):
                return
            raise ValueError(f"the record at byte {at} is damaged, and others follow it")
        yield kind, begin, end
        at = end


def is_incomplete(data: memoryview, at: int) -> bool:
    """Return whether the bad record at `at` is a torn tail: no valid record follows it."""
    for begin in _candidates(data, at + 1):
        length, crc, kind = HEAD.unpack_from(data, begin)
        if zlib.crc32(data[begin + HEAD_BYTES : begin + HEAD_BYTES + length], _SEEDS[kind]) == crc:
            return False
    return True


def _candidates(data: memoryview, start: int) -> Iterator[int]:
    """Yield the offsets at which a record may begin."""
    for first in range(start, len(data) - _LEAST + 1, _CHUNK):
        # copied: an array over the file itself would hold it open
        chunk = np.frombuffer(bytes(data[first : first + _CHUNK + _LEAST - 1]), np.uint8)
        count = len(chunk) - _LEAST + 1
        kinds = chunk[HEAD_BYTES - 1 : HEAD_BYTES - 1 + count]
        high = chunk[_LEAST - 2 : _LEAST - 2 + count] | chunk[_LEAST - 1 : _LEAST - 1 + count]  # of the first number
        places = np.flatnonzero((kinds >= min(Kind)) & (kinds <= max(Kind)) & (high == 0))
        bytes_of = [chunk[places + place].astype(np.int64) << 8 * place for place in range(4)]
        lengths = bytes_of[0] | bytes_of[1] | bytes_of[2] | bytes_of[3]
        fit = _of_kind(kinds[places], lengths) & (first + places + HEAD_BYTES + lengths <= len(data))
        yield from (first + places[fit]).tolist()


def _of_kind(kinds: NDArray[np.uint8], lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return whether bodies of these kinds can have these lengths."""
    numbers = (lengths >= NUMBER_BYTES) & (lengths % NUMBER_BYTES == 0)
    possible: NDArray[np.bool_] = (
        ((kinds == Kind.FINISHED) & (lengths >= NUMBER_BYTES))
        | ((kinds == Kind.STARTED) & (lengths == STARTED_BYTES))
        | (np.isin(kinds, (Kind.AGAIN, Kind.SAVED, Kind.NO_SIGNAL, Kind.RUN)) & (lengths == NUMBER_BYTES))
        | (((kinds == Kind.TRAIN) | (kinds == Kind.BASE)) & numbers)
    )
    return possible
