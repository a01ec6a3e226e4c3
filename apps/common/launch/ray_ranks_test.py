"""The variables of ranks, held to those that torchrun itself gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

from apps.common.launch.rank_actor import Place
from apps.common.launch.ray_ranks import rank_variables

TELL = """
import json, os, sys
from pathlib import Path
names = sys.argv[2:]
Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps({name: os.environ[name] for name in names}))
"""
OF_THE_PLACE = {"MASTER_ADDR", "MASTER_PORT"}


def test_ranks_get_what_torchrun_gives(tmp_path: Path) -> None:
    """Two machines of two ranks, each torchrun's agent a process here."""
    places = [Place(f"machine{rank // 2}", f"10.0.0.{rank // 2}", {}) for rank in range(4)]
    ours = rank_variables(places, 2, 29500)
    program = tmp_path / "tell.py"
    program.write_text(TELL)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    torchrun += ["--master-addr", "127.0.0.1", "--master-port", "29531"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    agents = [
        subprocess.Popen([*torchrun, "--node-rank", str(node), str(program), str(tmp_path), *ours[0]], env=env)
        for node in range(2)
    ]
    assert [agent.wait(300) for agent in agents] == [0, 0]
    for rank, own in enumerate(ours):
        theirs = json.loads((tmp_path / str(rank)).read_text())
        assert {**theirs, **{name: own[name] for name in OF_THE_PLACE}} == own


def test_ranks_of_a_machine_see_its_devices_in_their_order() -> None:
    devices = ["3", "1", "0", "2"]
    places = [Place("m", f"10.0.0.{i // 2}", {"CUDA_VISIBLE_DEVICES": name}) for i, name in enumerate(devices)]
    found = [own["CUDA_VISIBLE_DEVICES"] for own in rank_variables(places, 2, 1)]
    assert found == ["3,1", "3,1", "0,2", "0,2"]


def test_on_loopback_collectives_stay_there() -> None:
    (own,) = rank_variables([Place("m", "127.0.0.1", {})], 1, 1)
    assert own["GLOO_SOCKET_IFNAME"] == own["NCCL_SOCKET_IFNAME"] == "lo"
    (other,) = rank_variables([Place("m", "10.0.0.1", {})], 1, 1)
    assert "GLOO_SOCKET_IFNAME" not in other
