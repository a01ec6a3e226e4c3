"""Process groups work in the sandbox: two processes, gloo, the loopback device."""

import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _worker(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    x = torch.tensor([rank + 1.0])
    dist.all_reduce(x)
    assert x.item() == 3.0
    dist.destroy_process_group()


def test_two_processes_reduce_over_loopback() -> None:
    """The whole of what a multi-process test needs of the sandbox."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(_worker, args=(port,), nprocs=2)
