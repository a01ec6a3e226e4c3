"""The records of a ledger and their bytes: a frame each, with its length and a checksum.

    u32 length of the body | u32 crc32 of kind and body | u8 kind | body

All numbers are little-endian. A file begins with `MAGIC`. A write that a crash cut short is a torn tail: the last frame
lacks bytes, or its checksum is wrong and nothing follows it, or only zeros do (a file system may lengthen a file before
it writes it). Any other checksum failure is damage, which is reported and not repaired.
"""

import struct
import zlib
from collections.abc import Sequence
from enum import IntEnum

MAGIC = b"tessera ledger 1\n"
HEAD = struct.Struct("<IIB")
HEAD_BYTES = HEAD.size
_NUMBER = struct.Struct("<q")
_STARTED = struct.Struct("<qi")
NUMBER_BYTES, STARTED_BYTES = _NUMBER.size, _STARTED.size
NUMBER_LIMIT = 1 << 8 * (NUMBER_BYTES - 2)
"""Bound of the numbers that records begin with, by which `rollout.ledger.reading` knows what can be one."""


class Kind(IntEnum):
    """The kinds of records."""

    BASE = 1
    """Steps done, and ranges of the groups that they trained: what compaction keeps of all earlier records."""
    STARTED = 2
    """A group is about to be sampled, with this version."""
    FINISHED = 3
    """A group is sampled; its payload follows."""
    AGAIN = 4
    """A group failed with its sampler: what was sampled of it is gone."""
    TRAIN = 5
    """A step is about to be trained on these groups."""
    SAVED = 6
    """A checkpoint of this step is whole."""
    NO_SIGNAL = 7
    """A group is sampled, and nothing of it is trained: it is done."""
    RUN = 8
    """The number of the run that writes the file."""


def frame(kind: Kind, body: bytes) -> bytes:
    """Return the bytes of a record."""
    return HEAD.pack(len(body), zlib.crc32(body, zlib.crc32(bytes((kind,)))), kind) + body


def number_body(number: int, payload: bytes = b"") -> bytes:
    """Return the body of FINISHED (with its payload), AGAIN, SAVED, NO_SIGNAL and RUN."""
    return _NUMBER.pack(number) + payload


def started_body(number: int, version: int) -> bytes:
    """Return the body of STARTED."""
    return _STARTED.pack(number, version)


def numbers_body(first: int, numbers: Sequence[int]) -> bytes:
    """Return the body of TRAIN (step, groups) and BASE (steps done, begins and ends of ranges)."""
    return struct.pack(f"<{len(numbers) + 1}q", first, *numbers)


def read_number(data: memoryview, begin: int) -> int:
    """Read the number at the beginning of a body."""
    return int(_NUMBER.unpack_from(data, begin)[0])


def read_started(data: memoryview, begin: int) -> tuple[int, int]:
    """Read group and version."""
    number, version = _STARTED.unpack_from(data, begin)
    return number, version


def read_numbers(data: memoryview, begin: int, end: int) -> tuple[int, tuple[int, ...]]:
    """Read the numbers of `numbers_body`."""
    first, *rest = struct.unpack_from(f"<{(end - begin) // 8}q", data, begin)
    return first, tuple(rest)
