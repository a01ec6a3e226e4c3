"""torch's stores on loopback: by what the kernel says, between two processes, and as process groups make them."""

import importlib
import multiprocessing
import socket
from datetime import timedelta
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from rollout.vllm.server.loopback_store import LoopbackStore, hold_stores_to_loopback

WAIT = timedelta(seconds=60)
EVERYWHERE = (["::"], ["0.0.0.0"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def interfaces(port: int) -> list[str]:
    """Of this process's sockets that listen on a port."""
    sockets = psutil.Process().net_connections("inet")
    found = [one.laddr.ip for one in sockets if one.status == psutil.CONN_LISTEN and one.laddr.port == port]
    return [address.removeprefix("::ffff:") for address in found]


def ask(port: int, answers: Any) -> None:
    store = LoopbackStore("127.0.0.1", port, 2, is_master=False, timeout=WAIT)
    store.set("from", "afar")
    answers.put(store.get("word"))


def test_a_store_listens_on_loopback_and_serves_another_process() -> None:
    store = LoopbackStore("127.0.0.1", 0, 2, is_master=True, timeout=WAIT, wait_for_workers=False)
    assert interfaces(store.port) == ["127.0.0.1"]
    store.set("word", "here")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    child = context.Process(target=ask, args=(store.port, answers))
    child.start()
    assert answers.get(timeout=60) == b"here"
    assert store.get("from") == b"afar"
    child.join(60)


def test_a_store_among_machines_listens_on_this_ones_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.2")
    store = LoopbackStore("127.0.0.2", 0, 1, is_master=True, timeout=WAIT)
    assert interfaces(store.port) == ["127.0.0.2"]


def test_torchs_own_listens_on_all_interfaces() -> None:
    """Why there is another."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=WAIT)
    assert interfaces(store.port) in EVERYWHERE


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        LoopbackStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)


def test_groups_and_vllm_get_it_by_its_usual_name(monkeypatch: pytest.MonkeyPatch) -> None:
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    for module in (dist, rendezvous):
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # put back after the test
    hold_stores_to_loopback()
    hold_stores_to_loopback()
    assert dist.TCPStore is LoopbackStore
    port = free_port()
    store, rank, world = next(rendezvous.rendezvous(f"tcp://127.0.0.1:{port}", 0, 1, timeout=WAIT))
    assert (rank, world, interfaces(port)) == (0, 1, ["127.0.0.1"])
    store.set("a", "b")
    assert store.get("a") == b"b"


def test_a_store_for_other_machines_is_left_as_it_is() -> None:
    store = LoopbackStore("0.0.0.0", 0, 1, is_master=True, timeout=WAIT)
    assert interfaces(store.port) in EVERYWHERE
