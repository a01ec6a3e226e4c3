"""Settings of HCCL, the collectives of Ascend NPUs: it reads them from the environment when a group is made."""

from collections.abc import Mapping
from dataclasses import dataclass

TIMEOUT = "HCCL_CONNECT_TIMEOUT"
HOST_PORTS = "HCCL_HOST_SOCKET_PORT_RANGE"
NPU_PORTS = "HCCL_NPU_SOCKET_PORT_RANGE"
LONGEST = 7200


@dataclass(frozen=True)
class HcclSettings:
    """Settings with which ranks connect. The defaults suit long starts: a hundred ranks that load a model first."""

    connect_timeout: int = 1500
    """Seconds that a rank waits for the others to connect, 120 to 7200 (HCCL's own default is 120)."""
    host_ports: str = "60000-60050"
    """Ports of the host that ranks of one machine may take, FIRST-LAST; a process takes one."""
    npu_ports: str = "61000-61050"
    """Ports on the NPU's own interface, FIRST-LAST."""

    def __post_init__(self) -> None:
        """Raise ValueError for a timeout that HCCL does not take, and for port ranges that are malformed or overlap."""
        if not 120 <= self.connect_timeout <= LONGEST:
            raise ValueError(f"{TIMEOUT} must lie between 120 and {LONGEST} seconds, got {self.connect_timeout}")
        first, second = port_range(HOST_PORTS, self.host_ports), port_range(NPU_PORTS, self.npu_ports)
        if first.start < second.stop and second.start < first.stop:
            raise ValueError(f"{HOST_PORTS}={self.host_ports} and {NPU_PORTS}={self.npu_ports} share ports: move one")

    @classmethod
    def read(cls, given: Mapping[str, str]) -> "HcclSettings":
        """Return an environment's settings, with defaults for the rest. ValueError for what HCCL would not take."""
        text = given.get(TIMEOUT, str(cls.connect_timeout))
        if not text.isdecimal():
            raise ValueError(f"{TIMEOUT} must be a whole number of seconds, got {text!r}")
        return cls(int(text), given.get(HOST_PORTS, cls.host_ports), given.get(NPU_PORTS, cls.npu_ports))

    def environment(self) -> dict[str, str]:
        """Return the variables that HCCL reads."""
        return {TIMEOUT: str(self.connect_timeout), HOST_PORTS: self.host_ports, NPU_PORTS: self.npu_ports}

    def check_room(self, ranks_per_host: int) -> None:
        """Raise ValueError where a range holds fewer ports than the machine has ranks."""
        for name, text in ((HOST_PORTS, self.host_ports), (NPU_PORTS, self.npu_ports)):
            if len(ports := port_range(name, text)) < ranks_per_host:
                raise ValueError(f"{name}={text} has {len(ports)} ports for {ranks_per_host} ranks: widen it")


def port_range(name: str, text: str) -> range:
    """Return the ports of FIRST-LAST. ValueError for anything else: HCCL's "auto" leaves the choice to the system,
    which a firewall between machines does not know."""
    first, dash, last = text.partition("-")
    if not (dash and first.isdecimal() and last.isdecimal() and 1024 <= int(first) <= int(last) <= 65535):
        raise ValueError(f"{name} must be FIRST-LAST with ports from 1024 to 65535, got {text!r}")
    return range(int(first), int(last) + 1)
