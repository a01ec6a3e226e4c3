"""Messages between an engine and its server: JSON behind its length, on a socket that the two were born with.

Nothing listens: the socket is one end of a pair, inherited when the server is started. Weights do not pass here. Large
binary data, the patches of images, follows a message as bytes, whose number it states (`TAIL`).
"""

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any

_LENGTH = struct.Struct("!I")
LONGEST = 1 << 28
"""Most bytes of a message."""
TAIL = "tail"
"""Key of the bytes that follow a message: their number when it is sent, the bytes themselves when it is received."""
TURN = "turn"
"""Key of a message's number for copies that make their steps together, the same for all of them."""
LONGEST_TAIL = 1 << 34


class Wire:
    """One end: any thread may send, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any], tail: Sequence[memoryview] = ()) -> None:
        """Send one message whole, and bytes after it. Raise OSError where the other end is gone.

        Raises ValueError for one that is too long, or has a `TAIL` of its own, which would be read as a number of
        bytes.
        """
        if TAIL in message:
            raise ValueError(f"{TAIL!r} in a message is the wire's own: name it otherwise, or give its bytes as `tail`")
        size = sum(part.nbytes for part in tail)
        if size > LONGEST_TAIL:
            raise ValueError(f"{size} bytes behind a message are over the {LONGEST_TAIL} that the wire takes")
        data = json.dumps(message | ({TAIL: size} if tail else {}), separators=(",", ":")).encode()
        if len(data) > LONGEST:
            raise ValueError(f"a message of {len(data)} bytes is over the {LONGEST} that the wire takes")
        with self._sending:
            self._end.sendall(_LENGTH.pack(len(data)) + data)
            for part in tail:
                self._end.sendall(part)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next message; None once the other end is gone, or after the time limit."""
        try:
            self._end.settimeout(seconds)
        except OSError:  # closed here, by another thread
            return None
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > LONGEST:
            raise ValueError(f"a message of {length} bytes is announced, over the {LONGEST} that the wire takes")
        data = self._read(length)
        if data is None:
            return None
        message: dict[str, Any] = json.loads(data)
        if TAIL in message:
            count = message[TAIL]
            if type(count) is not int or not 0 <= count <= LONGEST_TAIL:
                raise ValueError(f"{count!r} bytes are announced, of the {LONGEST_TAIL} at most that the wire takes")
            message[TAIL] = self._read(count)
        return None if message.get(TAIL, b"") is None else message

    def close(self) -> None:
        """Close this end; receivers at both ends get None."""
        with contextlib.suppress(OSError):  # the other end closed first
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, count: int) -> bytearray | None:
        data = bytearray(count)
        left = memoryview(data)
        while left:
            try:
                got = self._end.recv_into(left)
            except OSError:
                return None
            if not got:
                return None
            left = left[got:]
        return data
