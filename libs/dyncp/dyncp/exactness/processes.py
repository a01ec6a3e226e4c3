"""Start a world of processes once and run many checks in it: for tests and for the matrix command."""

import os
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_world(
    world_size: int, check: Callable[..., Any], *args: Any, backend: str = "gloo", timeout: float = 600.0
) -> list[Any]:
    """Run check(*args) in each of world_size processes on this machine; return the list of the ranks' results.

    backend: gloo on the CPU, or nccl, which gives each process the CUDA device of its rank. timeout: seconds that a
    collective waits for the other ranks. The first rank that raises ends them all, with its traceback in the
    RuntimeError. Start processes once per world size and loop inside `check`: a start costs seconds. Results must be
    plain data (torch saves them).
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        of_all = (world_size, port, folder, backend, timeout, check, args)
        mp.start_processes(_main, of_all, nprocs=world_size, start_method="spawn")
        return [torch.load(Path(folder) / str(rank)) for rank in range(world_size)]


def _main(
    rank: int,
    world_size: int,
    port: int,
    folder: str,
    backend: str,
    timeout: float,
    check: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    waits = timedelta(seconds=timeout)
    dist.init_process_group(backend, rank=rank, world_size=world_size, device_id=device, timeout=waits)
    torch.save(check(*args), Path(folder) / str(rank))
    dist.barrier()
    dist.destroy_process_group()
