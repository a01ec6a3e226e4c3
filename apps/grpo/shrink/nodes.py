"""The Ray cluster of a shrunk run whose pools are apart: nodes of this machine, alive as long as the run."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from apps.grpo.config import GrpoConfig
from schedules.ray.cluster import paths_of_children, ray_module

ADDRESS = "RAY_ADDRESS"


@contextmanager
def nodes_for(config: GrpoConfig) -> Iterator[None]:
    """Start a cluster and name it in $RAY_ADDRESS inside, where a run's pools are apart and no cluster is named; print
    so.

    A node that trains, and those that sample with the processors that the samplers ask for; each is a Ray daemon of
    this machine on loopback.

    Raises:
        ValueError: there is no ray.
    """
    pools, rollout = config.cluster.pools, config.cluster.rollout
    apart = pools.placement == "separate" and rollout.ray_workers
    if not apart or rollout.ray_address or os.environ.get(ADDRESS):
        yield
        return
    local = ray_module("rollout.workers.ray_local")
    parts = -(-rollout.ray_workers * rollout.ray_nodes // pools.rollout_nodes)
    each = parts * rollout.ray_cpus / rollout.ray_nodes
    with paths_of_children(), local.local_nodes([1.0, *[each] * pools.rollout_nodes]) as address:
        sys.stdout.write(f"Ray: 1 + {pools.rollout_nodes} nodes, all of this machine, at {address}\n")
        sys.stdout.flush()
        os.environ[ADDRESS] = address
        try:
            yield
        finally:
            del os.environ[ADDRESS]
