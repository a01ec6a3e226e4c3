"""Launch lines name the program as it is called where the plan was made; `apps/common/tests` holds their flags."""

from dataclasses import replace

import pytest

from engines import EngineConfig
from runplan import PlainCluster, PlainPools
from runplan.report.launch_lines import launch_lines
from runplan.run_spec import RunSpec

SPEC = RunSpec("sft", "finetune", EngineConfig(), PlainCluster(), processes=2, steps=1, rows=4, longest=64)
NODES = replace(SPEC, cluster=PlainCluster(pools=PlainPools(nodes=2)))
BY_RAY = ("--recipe", "finetune", "--launch", "ray")


@pytest.mark.parametrize(
    ("spec", "installed", "words"),
    [
        (SPEC, False, "./bazelw run //apps/sft -- --recipe finetune --nproc-per-node 2"),
        (SPEC, True, "tessera-sft --recipe finetune --nproc-per-node 2"),
        (NODES, False, " -m apps.sft.main --recipe finetune --run-dir RUN"),
        (NODES, True, " -m tessera_apps.apps.sft.main --recipe finetune --run-dir RUN"),
        (
            replace(SPEC, words=BY_RAY),
            False,
            "./bazelw run //apps/sft:ray -- --recipe finetune --launch ray --nproc-per-node 2",
        ),
        (
            replace(NODES, words=BY_RAY),
            True,
            "RAY_ADDRESS=HEAD:6379 tessera-sft --recipe finetune --launch ray --run-dir RUN",
        ),
    ],
)
def test_the_program_is_a_target_or_an_installed_command(spec: RunSpec, installed: bool, words: str) -> None:
    assert launch_lines(replace(spec, installed=installed))[-1].endswith(words)


def test_pools_of_several_machines_are_started_by_ray() -> None:
    apart = PlainCluster(pools=PlainPools(nodes=2, rollout_nodes=3, placement="separate"))
    lines = launch_lines(replace(SPEC, cluster=apart))
    assert [line for line in lines if "ray start" in line] == [
        "ray start --head --port 6379",
        "ray start --address HEAD:6379",
    ]
    assert "on each of 4 more nodes:" in lines
    assert lines[-1].startswith("RAY_ADDRESS=HEAD:6379 ")
    assert lines[-1].endswith("--run-dir RUN --launch ray")
