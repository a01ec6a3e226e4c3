"""Which interfaces the processes below this one listen on, by what the kernel says: for tests."""

import psutil


def listening(*beside: psutil.Process) -> dict[str, set[str]]:
    """Addresses by the names of the processes that listen there over IP; of those `beside` the ones below too."""
    found: dict[str, set[str]] = {}
    for process in (*beside, *psutil.Process().children(recursive=True)):
        try:
            sockets, name = process.net_connections("inet"), process.name()
        except psutil.NoSuchProcess:  # it ended since
            continue
        for one in sockets:
            if one.status == psutil.CONN_LISTEN:
                found.setdefault(name, set()).add(one.laddr.ip.removeprefix("::ffff:"))
    return found
