"""The interfaces on which the processes below this one listen, as the kernel lists them: for tests."""

import psutil


def listen_addresses(*beside: psutil.Process) -> dict[str, set[str]]:
    """Return the IP addresses on which processes listen, by name: children, those `beside`, and their children."""
    addresses: dict[str, set[str]] = {}
    for process in (*beside, *psutil.Process().children(recursive=True)):
        try:
            sockets, name = process.net_connections("inet"), process.name()
        except psutil.NoSuchProcess:  # it ended since
            continue
        for one in sockets:
            if one.status == psutil.CONN_LISTEN:
                addresses.setdefault(name, set()).add(one.laddr.ip.removeprefix("::ffff:"))
    return addresses
