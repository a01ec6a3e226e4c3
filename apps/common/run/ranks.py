"""Threads, seeds and memory of a rank, before anything is built."""

import gc
import os
import random

from apps.common.run.host_memory import keep_freed_memory, use_huge_pages
from engines.torchrun import under_torchrun
from rollout.workers.authentication import make_secret, run_secret


def ranks_of_node(processes: int, nodes: int) -> int:
    """Return the number of ranks on each node: torchrun's share of a node, else `processes`.

    Raises:
        ValueError: torchrun's ranks are no multiple of the nodes.
    """
    if not under_torchrun():
        return processes
    here = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    if nodes == 1 and here < int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"torchrun started {here} of {os.environ['WORLD_SIZE']} ranks here, and the rest elsewhere: set "
            "--pools.nodes to torchrun's --nnodes"
        )
    ranks, rest = divmod(int(os.environ["WORLD_SIZE"]), nodes)
    if rest or not ranks:
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} ranks, which {nodes} nodes can't share evenly: set "
            "--pools.nodes to torchrun's --nnodes"
        )
    return ranks


def ensure_secret() -> None:
    """Make the secret by which the ranks authenticate, where this process starts them.

    Raises:
        ValueError: torchrun started them, and its environment has none.
    """
    if under_torchrun():
        run_secret()
    else:
        make_secret()


def init_rank(threads: int, seed: int) -> None:
    """Set this rank's threads and global seeds, before anything is built."""
    import torch  # slow to load, and a command line asks for the ranks of a node alone

    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)  # a delta net's decays end below 1e-38, where a CPU multiplies many times slower
    torch.manual_seed(seed)
    random.seed(seed)
    freeze_gc()
    keep_freed_memory()
    use_huge_pages()


def freeze_gc() -> None:
    """Keep Python's cycle collector from scanning the imported packages again and again.

    A step makes some hundred thousand objects that live until its end, for which the collector by default walks all
    that was ever made, a million objects of torch and transformers among them: a third of a step of short answers.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
