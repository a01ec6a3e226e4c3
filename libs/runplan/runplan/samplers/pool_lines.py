"""Text of buffers and bytes in the lines of a plan."""

from collections.abc import Sequence

from runplan.estimates.buffers import Buffer
from runplan.estimates.states import GIB

LinesAndProblems = tuple[list[str], list[str]]


def gib(size: float) -> str:
    """Return bytes as text in GiB, of a small model in MiB."""
    return f"{size / GIB:.1f} GiB" if not 0 < size < GIB / 20 else f"{size / 2**20:.2f} MiB"


def places(buffer: Buffer) -> str:
    """Return the bytes of a buffer on the device and on the host, as text."""
    sizes = ((buffer.device, "on the device"), (buffer.host, "on the host"))
    texts = [f"{gib(size)} {where}" for size, where in sizes if size]
    return " and ".join(texts) + (f", {buffer.note}" if buffer.note else "" if buffer.always else ", meanwhile")


def host_line(buffers: Sequence[Buffer], node: int, every: int, pool: str) -> str:
    """Return the line on host memory: what stays, and the largest of what is temporary."""
    stays = sum(buffer.host for buffer in buffers if buffer.always)
    passing = max((buffer.host for buffer in buffers if not buffer.always), default=0.0)
    rank = stays + passing
    return (
        f"{pool}: at most {gib(rank)} of host memory a process ({gib(stays)} of it always), {gib(rank * node)} "
        f"a node, {gib(rank * every)} in all"
    )
