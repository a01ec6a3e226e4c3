"""torch's rendezvous stores of vLLM's processes, bound to loopback, or to the address that other machines' know.

A `TCPStore` listens on all interfaces, whatever host it gets, and whoever reaches it reads and writes what workers tell
each other, pickled objects among it. But it takes a socket that listens already: one of loopback, where the host is.
Called before vLLM is imported, which takes the class by name.
"""

import importlib
import os
import socket
from datetime import timedelta

import torch.distributed as dist

LOOPBACK = ("127.0.0.1", "localhost")


class LoopbackStore(dist.TCPStore):
    """torch's store, listening on its host alone where that is loopback, or this machine's among several."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        own = None
        if is_master and master_listen_fd is None and host_name in (*LOOPBACK, os.environ.get("VLLM_HOST_IP")):
            own = socket.create_server((host_name, port), backlog=512)
            port, master_listen_fd = own.getsockname()[1], own.fileno()
        super().__init__(
            host_name=host_name,
            port=port,
            world_size=world_size,
            is_master=is_master,
            timeout=timeout,
            wait_for_workers=wait_for_workers,
            multi_tenant=multi_tenant,
            master_listen_fd=master_listen_fd,
            use_libuv=use_libuv,
        )
        if own is not None:
            own.detach()  # it is torch's now


def hold_stores_to_loopback() -> None:
    """Replace `TCPStore` by `LoopbackStore` in this process; a second call changes nothing."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function of torch.distributed has its name
    for module in (dist, rendezvous):
        vars(module)["TCPStore"] = LoopbackStore
