"""Messages arrive as they were sent, whole and in order, whoever sends; an end that is gone is told."""

import json
import socket
import struct
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.vllm.client import wire
from rollout.vllm.client.wire import TAIL, Wire

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def pair() -> tuple[Wire, Wire]:
    one, other = socket.socketpair()
    return Wire(one), Wire(other)


def text_of(end: Wire) -> str:
    message = end.receive()
    assert message is not None
    text: str = message["text"]
    return text


keys = st.text().filter(lambda key: key != TAIL)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(keys, plain), max_size=5))
def test_messages_arrive_as_they_were_sent(messages: list[dict[str, Any]]) -> None:
    one, other = pair()
    for message in messages:
        one.send(message)
    one.close()
    assert [other.receive() for _ in messages] == messages
    assert other.receive() is None
    other.close()


def test_threads_do_not_mix_their_messages() -> None:
    one, other = pair()
    texts = [str(i) * 100_000 for i in range(8)]
    threads = [threading.Thread(target=one.send, args=({"text": text},)) for text in texts]
    for thread in threads:
        thread.start()
    assert {text_of(other) for _ in texts} == set(texts)
    for thread in threads:
        thread.join()
    one.close()
    other.close()


def test_who_reads_an_end_that_was_closed_here_is_told_so() -> None:
    one, other = pair()
    one.close()
    assert one.receive() is None
    other.close()


def test_half_a_message_is_the_end() -> None:
    one, other = socket.socketpair()
    one.sendall(b"\0\0\0\x0a{}")
    one.close()
    assert Wire(other).receive() is None
    other.close()


def test_a_message_beyond_the_limit_is_refused_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    monkeypatch.setattr(wire, "LONGEST", 10)
    with pytest.raises(ValueError, match="over the 10"):
        Wire(one).send({"text": "0123456789"})
    one.sendall(b"\0\0\0\x0b")
    with pytest.raises(ValueError, match="11 bytes is announced"):
        Wire(other).receive()
    one.close()
    other.close()


def test_who_sends_to_nobody_hears_of_it() -> None:
    one, other = pair()
    other.close()
    with pytest.raises(OSError):
        one.send({})
    one.close()


def test_bytes_follow_a_message_whole() -> None:
    one, other = pair()
    parts = [bytes([number]) * 300_000 for number in range(3)]
    thread = threading.Thread(target=one.send, args=({"images": 3}, [memoryview(part) for part in parts]))
    thread.start()
    assert other.receive() == {"images": 3, "tail": b"".join(parts)}
    thread.join()
    one.send({"next": 1})
    assert other.receive() == {"next": 1}
    one.close()
    other.close()


def test_half_of_what_follows_is_the_end_and_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    one.sendall(b'\0\0\0\x0a{"tail":9}' + b"1234")
    one.close()
    assert Wire(other).receive() is None
    other.close()
    one, other = socket.socketpair()
    monkeypatch.setattr(wire, "LONGEST_TAIL", 8)
    with pytest.raises(ValueError, match="9 bytes behind a message"):
        Wire(one).send({}, [memoryview(b"123456789")])
    one.sendall(b'\0\0\0\x0a{"tail":9}')
    with pytest.raises(ValueError, match="9 bytes are announced"):
        Wire(other).receive()
    one.close()
    other.close()


@pytest.mark.parametrize("count", [None, True, 1.0, -1, "1"])
def test_a_message_has_no_tail_of_its_own(count: Any) -> None:
    one, other = pair()
    with pytest.raises(ValueError, match="'tail' in a message is the wire's own"):
        one.send({TAIL: count})
    one.send({"next": 1})
    assert other.receive() == {"next": 1}
    data = json.dumps({TAIL: count}).encode()
    one._end.sendall(struct.pack("!I", len(data)) + data)
    with pytest.raises(ValueError, match="bytes are announced"):
        other.receive()
    one.close()
    other.close()
