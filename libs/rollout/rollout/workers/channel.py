"""Messages between a run and its sampling process: JSON with raw bytes after it, over a pipe that only they hold.

Nothing is unpickled from the pipe: a message is JSON's own types and bytes.
"""

import json
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

Message = tuple[dict[str, Any], bytes]


class Channel:
    """One end of the pipe. Any thread may send, one may receive. Both raise EOFError or OSError once the other end is
    gone."""

    def __init__(self, connection: "Connection[Any, Any]") -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, head: Mapping[str, Any], payload: bytes = b"") -> None:
        """Send a message whole."""
        text = json.dumps(head, ensure_ascii=False).encode()
        with self._sending:
            self._connection.send_bytes(len(text).to_bytes(4, "little") + text + payload)

    def receive(self) -> Message:
        """Wait for the next message."""
        data = self._connection.recv_bytes()
        size = 4 + int.from_bytes(data[:4], "little")
        return dict(json.loads(data[4:size])), data[size:]

    def poll(self, seconds: float) -> bool:
        """Return whether a message has begun to come within so many seconds."""
        return self._connection.poll(seconds)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()
