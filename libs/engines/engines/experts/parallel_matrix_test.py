"""Every case of expert parallelism under FSDP2, on each number of ranks. By hand, as it takes minutes:
`bazel test //libs/engines:experts/parallel_matrix_test`.
"""

from typing import Any

import pytest

from engines.proofs.forked_ranks import launch_forked
from engines.testing.expert_parallel import CASES, assert_same_steps, exact, run_all

LAYOUTS = [(2, 2), (4, 2), (4, 4)]


@pytest.fixture(scope="module")
def one() -> Any:
    return launch_forked(run_all, (tuple(CASES), 1))


@pytest.mark.parametrize(("world", "ranks"), LAYOUTS)
def test_every_case_gives_the_steps_of_one_process(one: dict[str, Any], world: int, ranks: int) -> None:
    for name, many in launch_forked(run_all, (tuple(CASES), ranks), world).items():
        assert_same_steps(one[name], many, f"{ranks} of {world}: {name}")


@pytest.mark.parametrize(("world", "ranks"), LAYOUTS)
@pytest.mark.parametrize("kind", ["moe", "next", "qwen3_moe"])
def test_every_family_in_float64(kind: str, world: int, ranks: int) -> None:
    losses, weights = launch_forked(exact, (kind, 0))
    other, trained = launch_forked(exact, (kind, ranks), world)
    assert other == pytest.approx(losses, rel=1e-12)
    assert all((trained[key] - value).abs().max() < 1e-10 for key, value in weights.items())
