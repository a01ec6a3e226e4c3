"""Messages between an engine and its server: JSON behind its length, on a socket that the two were born with.

Nothing listens: the socket is one end of a pair, handed over when the server is started. Weights do not pass here.
"""

import contextlib
import json
import socket
import struct
import threading
from typing import Any

_LENGTH = struct.Struct("!I")
LONGEST = 1 << 28
"""Bytes of a message; a longer one is a mistake."""


class Wire:
    """One end: any thread may send, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        """Send one message whole. OSError: the other end is gone."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > LONGEST:
            raise ValueError(f"a message of {len(data)} bytes is over the {LONGEST} that the wire takes")
        with self._sending:
            self._end.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """The next message; None once the other end is gone, or says nothing for so long."""
        self._end.settimeout(seconds)
        head = self._read(_LENGTH.size)
        if head is None:
            return None
        (length,) = _LENGTH.unpack(head)
        if length > LONGEST:
            raise ValueError(f"a message of {length} bytes is announced, over the {LONGEST} that the wire takes")
        data = self._read(length)
        return None if data is None else json.loads(data)

    def close(self) -> None:
        """Close this end; whoever receives, here or there, is told None."""
        with contextlib.suppress(OSError):  # the other end was faster
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _read(self, count: int) -> bytes | None:
        parts: list[bytes] = []
        while count:
            try:
                part = self._end.recv(min(count, 1 << 20))
            except OSError:
                return None
            if not part:
                return None
            parts.append(part)
            count -= len(part)
        return b"".join(parts)
