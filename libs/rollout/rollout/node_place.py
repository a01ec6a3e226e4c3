"""Place of a process among the machines that one engine spans, in the words of `torchrun`: each process starts the
engine's part on its own machine, and the first one samples.
"""

import fcntl
import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass

VARIABLE = "TESSERA_NODE_PLACE"
"""Variable of a process that has such a place."""
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class NodePlace:
    """Place of a process: number `node_rank` of `nnodes`, all of which meet on the first one's machine."""

    node_rank: int
    nnodes: int
    address: str
    """IPv4 address by which the other machines reach this one."""
    master_addr: str
    master_port: int

    @property
    def variables(self) -> dict[str, str]:
        """The variable that gives a process this place."""
        return {VARIABLE: json.dumps(asdict(self))}

    @property
    def interface(self) -> str | None:
        """Name of this machine's network interface that has the address; None where none has."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                try:
                    answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                except OSError:  # it has no IPv4 address
                    continue
                if socket.inet_ntoa(answer[20:24]) == self.address:
                    return name
        return None


def place_of(nodes: int) -> NodePlace | None:
    """Return this process's place among the machines of an engine that spans so many; None where it is on one.

    Raises:
        ValueError: it is one of another number.
    """
    place = node_place()
    told = 1 if place is None else place.nnodes
    if told != nodes:
        raise ValueError(
            f"an engine over {nodes} machines (nodes), and this process is one of {told}: start it on each of them, as "
            "RayPool does (Demand.nodes)"
        )
    return place if nodes > 1 else None


def node_place(environ: Mapping[str, str] = os.environ) -> NodePlace | None:
    """Return this process's place; None where its engine is on one machine."""
    told = environ.get(VARIABLE)
    return None if told is None else NodePlace(**json.loads(told))


def free_port() -> int:
    """Return a port that is free on this machine at this moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
