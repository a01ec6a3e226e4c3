"""The loop of a sandbox's server, and of a session in it: a process for each request that comes with descriptors."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

REQUEST_BYTES = 16 << 20


def serve(channel: socket.socket, start: Callable[..., NoReturn]) -> NoReturn:
    """Fork a process that calls `start(kind, *descriptors)` for each message of the channel; end when it is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the runs' processes
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 64, 3)
        if not message:
            os._exit(0)  # the client is gone; with process 1, all namespaces end
        if os.fork() == 0:
            with exit_on_error(1):
                os.close(channel.detach())
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                start(message.decode(), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def read_request(descriptor: int) -> dict[str, Any]:
    """Return the request that a descriptor holds, and close it."""
    with open(descriptor, "rb") as file:
        requested: dict[str, Any] = json.loads(file.read(REQUEST_BYTES))
    return requested


@contextlib.contextmanager
def exit_on_error(status: int) -> Iterator[None]:
    """End the process with this status at an OSError, which is told on standard error."""
    try:
        yield
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(status)
