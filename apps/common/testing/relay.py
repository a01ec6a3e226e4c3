"""Relay of frames between two network devices, late and with losses: a slow network, where the kernel has no netem.

Run by path inside a network namespace: `python relay.py relay ONE OTHER SECONDS SHARE`, or before it, where the frames
come from, `python relay.py plain DEVICE`: the sender itself cuts its data into frames then, and computes checksums.
"""

import array
import fcntl
import random
import socket
import struct
import sys
import threading
import time
from collections import deque

_ALL_PROTOCOLS = 0x0003
_OUTGOING = 4
_SIOCETHTOOL = 0x8946
_SET_TRANSMIT_CHECKSUM = 0x17


def compute_checksums(device: str) -> None:
    """Let the kernel compute what a device would, which would not happen on the way through a relay."""
    command = array.array("I", [_SET_TRANSMIT_CHECKSUM, 0])
    request = struct.pack("16sP", device.encode(), command.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCETHTOOL, request)


def relay(one: str, other: str, seconds: float, share: float) -> None:
    """Pass frames on between two devices for ever, each after so many seconds; lose this share of them."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) for _ in range(2)]
    for end, device in zip(ends, (one, other), strict=True):
        end.bind((device, 0))
    for source, target in (ends, ends[::-1]):
        threading.Thread(target=_pass_on, args=(source, target, seconds, share)).start()


def _pass_on(source: socket.socket, target: socket.socket, seconds: float, share: float) -> None:
    waiting: deque[tuple[float, bytes]] = deque()
    there = threading.Semaphore(0)

    def send() -> None:
        while there.acquire():
            due, frame = waiting.popleft()
            time.sleep(max(0.0, due - time.monotonic()))
            target.send(frame)

    threading.Thread(target=send, daemon=True).start()
    while True:
        frame, address = source.recvfrom(65536)
        if address[2] != _OUTGOING and random.random() >= share:
            waiting.append((time.monotonic() + seconds, frame))
            there.release()


if __name__ == "__main__":
    if sys.argv[1] == "plain":
        compute_checksums(sys.argv[2])
    else:
        relay(sys.argv[2], sys.argv[3], float(sys.argv[4]), float(sys.argv[5]))
