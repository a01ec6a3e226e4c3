import pytest

from apps.common.shrink.fields import ProcessLimit
from apps.common.shrink.flag import parse_shrink_flag
from apps.sft.registry import recipes
from apps.sft.run import shrunk

LARGE = recipes()["qwen3-5-397b-a17b-megatron"].config


def torchrun(patch: pytest.MonkeyPatch, ranks: int, here: int) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": here, "MASTER_ADDR": "m", "MASTER_PORT": 1}
    for name, value in variables.items():
        patch.setenv(name, str(value))


def test_torchruns_ranks_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_shrink_flag(["--shrink=4", "--seed", "1"]) == (["--seed", "1"], ProcessLimit(4))
    torchrun(monkeypatch, 8, 4)
    for word in ("--shrink", "--shrink=8"):
        assert parse_shrink_flag([word]) == ([], ProcessLimit(8, 2))
    with pytest.raises(ValueError, match="torchrun started 8 ranks, --shrink=4 asks for others"):
        parse_shrink_flag(["--shrink=4"])


@pytest.mark.parametrize(("ranks", "machines"), [(4, 2), (8, 2), (8, 4)])
def test_a_recipe_is_spread_over_torchruns_machines(ranks: int, machines: int) -> None:
    small, _, differences = shrunk(LARGE, ProcessLimit(ranks, machines))
    assert (small.cluster.pools.nodes, small.nproc_per_node) == (machines, ranks // machines)
    assert any(str(difference).startswith("ranks  --pools.nodes  16 -> ") for difference in differences)


@pytest.mark.parametrize("ranks", [2, 6])
def test_other_ranks_than_torchruns_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"torchrun started {ranks} ranks, and the shrunk run has 4"):
        shrunk(LARGE, ProcessLimit(ranks, 2))
