"""Serve environments to runs on other machines: a process for each connection, which ends with it.

    TESSERA_ENVIRONMENT_KEY=SECRET python -m rollout.environments.processes.serve --listen 10.0.0.2:7600

A run names it by `--environment-servers 10.0.0.2:7600`, with the same key in its environment, and plays environments
there: their modules and files must be at the same names on this machine. Both sides prove that they have the key; what
they send is not encrypted, so listen on a network of your own. Whoever has the key runs any code here.
"""

import argparse
import os
import select
import socket
import struct
import sys
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from rollout.environments.processes.process import LOOK
from rollout.environments.processes.resident import half_of_memory, resident_bytes
from rollout.environments.processes.transports import kill_worker, read_address, shared_key, start_worker

KEY_SECONDS = 10


def serve(listener: Listener, key: bytes, memory: int) -> None:
    """Start a worker for each connection that has the key, for ever; one that says nothing keeps nobody waiting."""
    while True:
        threading.Thread(target=_welcome, args=(listener.accept(), key, memory), daemon=True).start()


def _welcome(connection: "Connection[Any, Any]", key: bytes, memory: int) -> None:
    """Ask for the key within seconds, show that it is here too, and play."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that dies closes nothing
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", KEY_SECONDS, 0))
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
        except (AuthenticationError, EOFError, OSError) as error:
            print(f"refused a connection: {error!r}", file=sys.stderr, flush=True)
            connection.close()
            return
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
    _play(connection, memory)


def _play(connection: "Connection[Any, Any]", memory: int) -> None:
    """Run a worker until it ends, its run is gone, or it takes too much memory; end all that it has started."""
    descriptor = connection.fileno()
    process = start_worker(descriptor)
    handle = os.pidfd_open(process.pid)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(descriptor, select.POLLRDHUP)
    why = ""
    while not why:
        events = dict(poll.poll(1000 * LOOK))
        if descriptor in events:  # asked first: a worker ends by itself where its run is gone
            why = "its run is gone"
        elif handle in events:
            why = "it ended"
        elif (taken := resident_bytes(process.pid)) > memory:
            why = f"it took {taken / 2**30:.2f} GiB of memory, {memory / 2**30:.2f} are its limit (--memory-gib)"
    kill_worker(process)
    os.close(handle)
    connection.close()
    print(f"process {process.pid} of environments: {why} (exit code {process.returncode})", file=sys.stderr, flush=True)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", default="127.0.0.1:7600", metavar="HOST:PORT", help="port 0: a free one")
    parser.add_argument("--memory-gib", type=float, help="of each process; half of the machine's memory by default")
    flags = parser.parse_args()
    memory = half_of_memory() if flags.memory_gib is None else int(flags.memory_gib * (1 << 30))
    key = shared_key()
    with Listener(read_address(flags.listen), "AF_INET", backlog=64) as listener:
        host, port = listener.address
        print(f"serves environments on {host}:{port}", flush=True)
        serve(listener, key, memory)


if __name__ == "__main__":
    main()
