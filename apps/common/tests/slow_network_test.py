"""The network between machines that are namespaces of this one: late, and with losses."""

import subprocess
import sys
from pathlib import Path

import pytest

from apps.common.testing.machines import machines, missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
SECONDS = 300
LISTEN = """
import socket
with socket.create_server(("", 5000)) as server, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    datagrams.bind(("", 5000))
    connection = server.accept()[0]
    data = b"".join(iter(lambda: connection.recv(65536), b""))
    connection.sendall(b"!")
    datagrams.settimeout(5)
    came = 0
    try:
        while True:
            came += len(datagrams.recv(100)) == 8
    except TimeoutError:
        print(len(data), data == bytes(range(256)) * 1000, came)
"""
SPEAK = """
import socket, sys, time
while True:
    start = time.monotonic()
    try:
        connection = socket.create_connection((sys.argv[1], 5000))
        break
    except ConnectionRefusedError:
        time.sleep(0.1)
print(time.monotonic() - start)
connection.sendall(bytes(range(256)) * 1000)
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
with socket.socket(type=socket.SOCK_DGRAM) as datagrams:
    for number in range(1000):
        datagrams.sendto(number.to_bytes(8, "big"), (sys.argv[1], 5000))
        time.sleep(0.001)
"""


def heard(delay: float, loss: float, folder: Path) -> tuple[float, list[str]]:
    """Return the seconds of a connection between two machines, and what one heard of the other's."""
    with machines(2, folder, delay=delay, loss=loss) as (one, other):
        plain = [sys.executable, "-S", "-c"]
        ends: list[subprocess.Popen[bytes]] = [
            one.start([*plain, LISTEN], folder / "heard"),
            other.start([*plain, SPEAK, one.address], folder / "said"),
        ]
        assert [end.wait(SECONDS) for end in ends] == [0, 0], (folder / "said").read_text()
    return float((folder / "said").read_text()), (folder / "heard").read_text().split()


def test_frames_come_late(tmp_path: Path) -> None:
    """A connection is made by a frame there and one back, each of which leaves a machine and reaches another."""
    seconds, (_, whole, _) = heard(0.1, 0.0, tmp_path)
    assert seconds >= 0.4
    assert whole == "True"


def test_lost_frames_are_sent_again_by_who_cares(tmp_path: Path) -> None:
    """TCP brings all bytes, datagrams are lost: of 1000 about 810 pass two relays that lose a tenth."""
    _, (_, whole, came) = heard(0.0, 0.1, tmp_path)
    assert whole == "True"
    assert 300 < int(came) < 900, "a busy machine loses more"
