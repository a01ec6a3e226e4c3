"""Ray on this machine alone: clusters of one or several nodes whose servers all listen on loopback.

Ray puts the machine's own address in the place of a loopback one, and then listens on all interfaces. It leaves it
alone where it takes itself for a system without clusters (a variable of its own, meant for Windows and macOS; it is
read when ray is imported, and its children read it anew). That is what `on_loopback` says, for as long as a cluster
begins or is found; `local_ray` refuses to go on if the address has changed all the same.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rollout.extras import missing_extra_message
from rollout.private_api import ray_constants

try:
    import ray
    from ray.cluster_utils import Cluster
except ImportError as error:
    raise ImportError(missing_extra_message("a Ray cluster needs ray", "ray")) from error

LOOPBACK = "127.0.0.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
SMALL_STORE = 80 << 20
"""Bytes of a node's object store: little more than the least that Ray takes."""


def is_loopback(address: str) -> bool:
    """Return whether HOST:PORT is of this machine's loopback interface."""
    return address.rpartition(":")[0] in (LOOPBACK, "localhost")


@contextmanager
def on_loopback() -> Iterator[None]:
    """Let Ray accept loopback addresses, in this process and in those that it starts, its daemons too."""
    constants = ray_constants()
    name = constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before, as_read = os.environ.get(name), constants.ENABLE_RAY_CLUSTER
    os.environ[name], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = as_read
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def local_ray(
    cpus: int | None = None, store_bytes: int | None = None, cuda: Sequence[str] | None = None
) -> Iterator[str]:
    """Start a cluster of one node and connect to it until the block ends; yield its HOST:PORT.

    `cpus`: number that it counts; by default the machine's. `cuda`: the CUDA devices that it gives out, as
    CUDA_VISIBLE_DEVICES names them; by default all that Ray finds. No dashboard, no usage statistics.

    Raises:
        RuntimeError: it listens elsewhere than on loopback.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with on_loopback(), _visible_devices(cuda):
        ray.init(
            address="local",
            num_cpus=cpus,
            num_gpus=None if cuda is None else len(cuda),
            object_store_memory=store_bytes,
            include_dashboard=False,
            _node_ip_address=LOOPBACK,
            configure_logging=False,
        )
    try:
        yield _checked_address(ray.get_runtime_context().gcs_address)
    finally:
        ray.shutdown()


@contextmanager
def local_nodes(cpus: Sequence[float], store_bytes: int = SMALL_STORE) -> Iterator[str]:
    """Start a cluster of a node for each entry of `cpus`, without a connection to it; yield its HOST:PORT.

    The first node is the head, where connecting processes count as being. They end with the block.

    Raises:
        RuntimeError: it listens elsewhere than on loopback.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    plain = {"node_ip_address": LOOPBACK, "object_store_memory": store_bytes, "include_dashboard": False}
    with on_loopback():
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": cpus[0], **plain})
        try:
            for count in cpus[1:]:
                cluster.add_node(num_cpus=count, **plain)
        except BaseException:
            cluster.shutdown()
            raise
    try:
        yield _checked_address(cluster.address)
    finally:
        cluster.shutdown()


@contextmanager
def _visible_devices(cuda: Sequence[str] | None) -> Iterator[None]:
    """Let daemons that are started inside see these devices alone; this process's own stay as they were."""
    before = os.environ.get(VISIBLE)
    if cuda is not None:
        os.environ[VISIBLE] = ",".join(cuda)
    try:
        yield
    finally:
        if before is not None:
            os.environ[VISIBLE] = before
        elif cuda is not None:
            del os.environ[VISIBLE]


def connect(address: str) -> None:
    """Connect this process to the cluster at HOST:PORT, also to one on this machine's loopback."""
    if not is_loopback(address):
        ray.init(address=address, configure_logging=False)
        return
    with on_loopback():
        ray.init(address=address, _node_ip_address=LOOPBACK, configure_logging=False)


def _checked_address(address: str) -> str:
    if not is_loopback(address):
        raise RuntimeError(f"Ray listens at {address}, and was told to stay on {LOOPBACK}")
    return address
