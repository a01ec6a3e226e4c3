"""A vLLM whose workers are on two machines, which are namespaces of this one: of one stage, or a stage on each.

By hand, as root, minutes: `./bazelw test --config=nodes //apps/common:tests/vllm_nodes_test`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from apps.common.testing.machines import Machine, machines, missing
from rollout.node_place import NodePlace
from rollout.vllm.testing.served import MEAN, PROMPTS, assert_agrees, distances, served

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
    pytest.mark.skipif("TESSERA_VLLM_PYTHON" not in os.environ, reason="needs vLLM (TESSERA_VLLM_PYTHON)"),
]
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
SECONDS = 1500
PORT = 29533


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_workers_on_two_machines_have_the_modules_log_probs_before_and_after_an_update(
    tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """And the engine is gone, by its own word, once one of the machines is."""
    shared = tmp_path / "shared"
    old, new = served(**HEADS), served(seed=1, **HEADS)
    for model, name in ((old, "old"), (new, "new")):
        model.save_pretrained(shared / name)
    with machines(2, tmp_path, shared) as pair:
        running = [_start(machine, pair[0], tmp_path, (tensor, pipeline)) for machine in pair]
        before, after = (_written(shared / f"{name}.json", running, tmp_path) for name in ("old", "new"))
        pair[1].kill()
        assert running[0].wait(SECONDS) == 3, (tmp_path / "log0").read_text()[-3000:]
    assert_agrees(old, PROMPTS, before)
    assert_agrees(new, PROMPTS, after)
    assert distances(new, PROMPTS, before).mean() > 5 * MEAN
    assert {version for one in after for version in one.policy_versions} == {1}


def _start(machine: Machine, first: Machine, folder: Path, spread: tuple[int, int]) -> "subprocess.Popen[bytes]":
    place = NodePlace(machine.number, 2, machine.address, first.address, PORT)
    command = [sys.executable, "-m", "rollout.vllm.testing.on_nodes", str(folder / "shared"), *map(str, spread)]
    variables = {**place.variables, "PYTHONPATH": ":".join(filter(None, sys.path))}
    return machine.start(command, folder / f"log{machine.number}", variables)


def _written(path: Path, running: "list[subprocess.Popen[bytes]]", folder: Path) -> list[Any]:
    """Return the completions that a file has, once it is there."""
    end = time.monotonic() + SECONDS
    while not path.exists():
        logs = [(folder / f"log{number}").read_text()[-3000:] for number in range(2)]
        assert all(process.poll() is None for process in running), logs
        assert time.monotonic() < end, logs
        time.sleep(0.2)
    return [SimpleNamespace(ids=i, log_probs=p, policy_versions=v) for i, p, v in json.loads(path.read_text())]
