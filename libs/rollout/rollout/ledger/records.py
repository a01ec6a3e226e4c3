"""The records of a ledger and their bytes: a frame each, with its length and a checksum.

    u32 length of the body | u32 crc32 of kind and body | u8 kind | body

All numbers are little-endian. A file begins with `MAGIC`. A write that a crash cut short is a torn tail: the last frame
lacks bytes, or its checksum is wrong and nothing follows it, or only zeros do (a file system may lengthen a file before
it writes it). Anything else that does not check is damage, which is told and not repaired.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

MAGIC = b"tessera ledger 1\n"
_HEAD = struct.Struct("<IIB")
_NUMBER = struct.Struct("<q")
_BEGUN = struct.Struct("<qi")


class Kind(IntEnum):
    """What a record says."""

    BASE = 1
    """Steps done, and ranges of the groups that they trained: what compaction leaves of everything before."""
    BEGUN = 2
    """A group is about to be sampled, with this version."""
    FINISHED = 3
    """A group is sampled; its payload follows."""
    AGAIN = 4
    """A group broke with its sampler: what was sampled of it is gone."""
    TRAIN = 5
    """A step is about to be trained on these groups."""
    SAVED = 6
    """A checkpoint of this step is whole."""


class Record(NamedTuple):
    """A record in a file: its body is at [begin, end)."""

    kind: int
    begin: int
    end: int


def frame(kind: Kind, body: bytes) -> bytes:
    """The bytes of a record."""
    return _HEAD.pack(len(body), zlib.crc32(body, zlib.crc32(bytes((kind,)))), kind) + body


HEAD_BYTES = _HEAD.size


def number_body(number: int, payload: bytes = b"") -> bytes:
    """Of FINISHED (with its payload), AGAIN and SAVED."""
    return _NUMBER.pack(number) + payload


def begun_body(number: int, version: int) -> bytes:
    """Of BEGUN."""
    return _BEGUN.pack(number, version)


def numbers_body(first: int, numbers: Sequence[int]) -> bytes:
    """Of TRAIN (step, groups) and BASE (steps done, begins and ends of ranges)."""
    return struct.pack(f"<{len(numbers) + 1}q", first, *numbers)


def read_number(data: memoryview, begin: int) -> int:
    """The number in front of a body."""
    return int(_NUMBER.unpack_from(data, begin)[0])


def read_begun(data: memoryview, begin: int) -> tuple[int, int]:
    """Group and version."""
    number, version = _BEGUN.unpack_from(data, begin)
    return number, version


def read_numbers(data: memoryview, begin: int, end: int) -> tuple[int, tuple[int, ...]]:
    """What `numbers_body` wrote."""
    first, *rest = struct.unpack_from(f"<{(end - begin) // 8}q", data, begin)
    return first, tuple(rest)


NUMBER_BYTES = _NUMBER.size


def records(data: memoryview, start: int) -> Iterator[Record]:
    """The whole records of a file from an offset on, up to its end or its torn tail.

    Raises:
        ValueError: a record is damaged and others follow it; the text names its offset.
    """
    at, size = start, len(data)
    seeds = {int(kind): zlib.crc32(bytes((kind,))) for kind in Kind}
    unpack, crc32 = _HEAD.unpack_from, zlib.crc32
    while at + HEAD_BYTES <= size:
        length, crc, kind = unpack(data, at)
        begin, end = at + HEAD_BYTES, at + HEAD_BYTES + length
        if end > size:
            if not _torn(data, at):
                raise ValueError(f"the record at byte {at} is damaged, and others follow it")
            return
        if kind not in seeds or crc32(data[begin:end], seeds[kind]) != crc:
            if end == size or _torn(data, at):
                return
            raise ValueError(f"the record at byte {at} is damaged, and others follow it")
        yield Record(kind, begin, end)
        at = end


def _torn(data: memoryview, at: int) -> bool:
    """Whether nothing that checks follows the bad record at `at`: a record that does is not the tail of a write."""
    seeds = {int(kind): zlib.crc32(bytes((kind,))) for kind in Kind}
    for begin in range(at + 1, len(data) - HEAD_BYTES + 1):
        length, crc, kind = _HEAD.unpack_from(data, begin)
        end = begin + HEAD_BYTES + length
        whole = kind in seeds and length and end <= len(data)
        if whole and zlib.crc32(data[begin + HEAD_BYTES : end], seeds[kind]) == crc:
            return False
    return True
