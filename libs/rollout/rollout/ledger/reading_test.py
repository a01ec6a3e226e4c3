"""Torn tails: found quickly, and as by trying every byte; a large last record, cut anywhere, is one."""

import random
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.ledger import reading
from rollout.ledger.reading import is_incomplete, records
from rollout.ledger.records import HEAD, HEAD_BYTES, MAGIC, Kind, frame, number_body, numbers_body, started_body

FRAMES = (
    frame(Kind.BASE, numbers_body(2, (0, 8))),
    frame(Kind.STARTED, started_body(9, 3)),
    frame(Kind.FINISHED, number_body(9, b"")),
    frame(Kind.FINISHED, number_body(9, b"answers")),
    frame(Kind.AGAIN, number_body(9)),
    frame(Kind.TRAIN, numbers_body(3, (8, 9))),
    frame(Kind.SAVED, number_body(3)),
)


def torn_by_every_byte(data: bytes, at: int) -> bool:
    """The reference: a record that checks, wherever it begins."""
    for begin in range(at + 1, len(data) - HEAD_BYTES + 1):
        length, crc, kind = HEAD.unpack_from(data, begin)
        body = data[begin + HEAD_BYTES : begin + HEAD_BYTES + length]
        whole = length and kind in list(Kind) and len(body) == length
        if whole and zlib.crc32(body, zlib.crc32(bytes((kind,)))) == crc:
            return False
    return True


def payload_of(kind: str, size: int) -> bytes:
    draw = random.Random(7)
    if kind == "random bytes":
        return draw.randbytes(size)
    return struct.pack(f"<{size // 8}q", *(draw.randrange(150_000) for _ in range(size // 8)))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(FRAMES), st.binary(max_size=40)), max_size=6), st.sampled_from([3, 20, 1 << 22])
)
def test_a_bad_record_is_torn_where_no_whole_one_follows(parts: list[bytes], chunk: int) -> None:
    data = b"\x09" + b"".join(parts)
    before, reading._CHUNK = reading._CHUNK, chunk
    try:
        assert is_incomplete(memoryview(data), 0) == torn_by_every_byte(data, 0)
    finally:
        reading._CHUNK = before


@pytest.mark.parametrize("kind", ["random bytes", "numbers of tokens"])
def test_a_large_last_record_cut_at_any_byte_is_torn(kind: str) -> None:
    whole = MAGIC + frame(Kind.STARTED, started_body(0, 0))
    data = whole + frame(Kind.FINISHED, number_body(0, payload_of(kind, 20_000)))
    for size in range(len(whole), len(data)):
        assert len(list(records(memoryview(data)[:size], len(MAGIC)))) == 1
    assert len(list(records(memoryview(data), len(MAGIC)))) == 2


@pytest.mark.parametrize("kind", ["random bytes", "numbers of tokens"])
def test_of_a_large_tail_few_bytes_are_looked_at(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four million at most one in a hundred, and all that is summed is little more than the tail: tens of MiB once
    took a minute."""
    data = memoryview(frame(Kind.FINISHED, number_body(0, payload_of(kind, 4 << 20)))[:-10])
    heads, summed = [0], [0]
    crc32 = zlib.crc32

    class Head:
        def unpack_from(self, found: memoryview, at: int) -> tuple[int, ...]:
            heads[0] += 1
            return HEAD.unpack_from(found, at)

    def counted(found: memoryview, value: int = 0) -> int:
        summed[0] += len(found)
        return crc32(found, value)

    monkeypatch.setattr(reading, "HEAD", Head())
    monkeypatch.setattr(zlib, "crc32", counted)
    assert is_incomplete(data, 0)
    assert heads[0] < len(data) // 100
    assert summed[0] < 100 * len(data)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="the record at byte 0 is damaged, and others follow it"):
        list(records(memoryview(bytes(data) + FRAMES[4]), 0))
