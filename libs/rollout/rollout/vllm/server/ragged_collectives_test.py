"""Rows between real gloo processes, against torch.cat and the plain sum of what each rank had."""

import multiprocessing
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollout.vllm.server.cpu_replicas import (
    MISSING_COLLECTIVES,
    LockstepTurn,
    LockstepTurns,
    patch_collectives,
    refusal,
    variables,
)
from rollout.vllm.server.ragged_collectives import gather_rows, sum_rows

WORLD = 3
SIZES = [(2, 5, 1), (0, 4, 3), (0, 0, 2), (0, 0, 0), (3, 3, 3)]
KINDS = [torch.float32, torch.bfloat16, torch.float64]


class Base:
    """As vLLM's class of all communicators: the exchanges have but names."""

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
        raise NotImplementedError

    def reduce_scatterv(self, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
        raise NotImplementedError


class Communicator(Base):
    def __init__(self, group: dist.ProcessGroup) -> None:
        self.device_group, self.world_size = group, WORLD


class Whole(Communicator):
    """It has one of the two."""

    def all_gatherv(self, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> str:
        return "its own"


def part(rank: int, rows: int, kind: torch.dtype, shape: tuple[int, ...] = (4,), salt: int = 0) -> torch.Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(7 * rank + salt)).to(kind)


def listed(rank: int, rows: int, kind: torch.dtype) -> list[torch.Tensor]:
    """What a layer of experts sends: states, weights and numbers of its experts, and one number a token."""
    numbers = torch.arange(rows * 2, dtype=torch.int32).reshape(rows, 2) + 100 * rank
    return [part(rank, rows, kind), part(rank, rows, torch.float32, (2,), 1), numbers, part(rank, rows, kind, ())]


def gathered_as_concatenated(rank: int, group: dist.ProcessGroup) -> None:
    for kind in KINDS:
        for sizes in SIZES:
            found = gather_rows(listed(rank, sizes[rank], kind), sizes, group)
            of_ranks = [listed(r, n, kind) for r, n in enumerate(sizes)]
            wanted = [torch.cat(of_all) for of_all in zip(*of_ranks, strict=True)]
            for has, wants in zip(found, wanted, strict=True):
                assert (has.dtype, has.shape) == (wants.dtype, wants.shape)
                assert torch.equal(has, wants)


def summed_as_by_hand(rank: int, group: dist.ProcessGroup) -> None:
    for kind in KINDS:
        for sizes in SIZES:
            for shape in ((4,), (2, 3), ()):
                addends = [part(r, sum(sizes), kind, shape) for r in range(WORLD)]
                found = sum_rows(addends[rank], sizes, group)
                begin = sum(sizes[:rank])
                whole = sum((one.double() for one in addends), torch.zeros((), dtype=torch.float64))
                wanted = whole[begin : begin + sizes[rank]]
                assert (found.dtype, found.shape) == (kind, wanted.shape)
                precision = torch.finfo(kind).eps
                torch.testing.assert_close(found.double(), wanted, rtol=2 * precision, atol=8 * precision)


def of_views_that_are_not_whole(rank: int, group: dist.ProcessGroup) -> None:
    """Columns of a larger tensor, as vLLM may hand them over."""
    wide = [part(r, 2, torch.bfloat16, (6,)) for r in range(WORLD)]
    (found,) = gather_rows([wide[rank][:, 1:4]], [2] * WORLD, group)
    assert torch.equal(found, torch.cat([one[:, 1:4] for one in wide]))
    for columns in (slice(1, 2), slice(1, 4)):  # a single row, whose strides nobody needs
        (found,) = gather_rows([wide[rank][1:, columns]], [1] * WORLD, group)
        assert torch.equal(found, torch.cat([one[1:, columns] for one in wide]))
        assert torch.equal(sum_rows(wide[0][:, columns][:1], [1, 0, 0], group), wide[0][:1, columns][rank:] * WORLD)
    sums = sum_rows(torch.cat([one.T for one in wide]), [6] * WORLD, group)
    torch.testing.assert_close(sums, wide[rank].T * WORLD)


def wrong_numbers_of_rows_are_told(rank: int, group: dist.ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"a part of 4 rows, where this rank has 2 of \[2, 2, 2\]"):
        gather_rows([torch.ones(4, 1)], [2] * WORLD, group)
    with pytest.raises(ValueError, match=r"5 rows, where the ranks have \[2, 2, 2\]"):
        sum_rows(torch.ones(5, 1), [2] * WORLD, group)


def lent_and_taken_back(rank: int, group: dist.ProcessGroup) -> None:
    one, whole = Communicator(group), Whole(group)
    undo = patch_collectives([one, whole], Base)
    sizes = [3, 0, 1]
    mine = part(rank, sizes[rank], torch.bfloat16)
    wanted = torch.cat([part(r, n, torch.bfloat16) for r, n in enumerate(sizes)])
    assert torch.equal(one.all_gatherv(mine, 0, sizes), wanted)
    several = one.all_gatherv([mine, mine.float()], dim=0, sizes=sizes)
    assert torch.equal(several[0], wanted)
    assert torch.equal(several[1], wanted.float())
    assert torch.equal(one.all_gatherv(wanted), wanted.repeat(WORLD, 1))  # of one size
    for communicator in (one, whole):
        assert torch.equal(communicator.reduce_scatterv(wanted, 0, sizes), mine * WORLD)
    assert torch.equal(one.reduce_scatterv(wanted[:3], dim=0), wanted[rank : rank + 1] * WORLD)
    with pytest.raises(ValueError, match="dimension 0, got -1"):
        one.reduce_scatterv(wanted)
    with pytest.raises(ValueError, match="dimension 0, got 1"):
        one.all_gatherv(wanted, 1)
    assert whole.all_gatherv(mine) == "its own"
    undo()
    for name in MISSING_COLLECTIVES:
        with pytest.raises(NotImplementedError):
            getattr(one, name)(mine)
    assert whole.all_gatherv(mine) == "its own"
    assert vars(one).keys() == vars(whole).keys() == {"device_group", "world_size"}


def copies_meet(rank: int, group: dist.ProcessGroup) -> None:
    turns = LockstepTurns(group)
    assert turns.meet(busy=rank == 1, seen=5 + rank) == LockstepTurn(busy=True, agreed=5, latest=7)
    assert turns.meet(busy=False, seen=9) == LockstepTurn(busy=False, agreed=9, latest=9)


CHECKS = [
    gathered_as_concatenated,
    summed_as_by_hand,
    of_views_that_are_not_whole,
    wrong_numbers_of_rows_are_told,
    lent_and_taken_back,
    copies_meet,
]


def rank_main(rank: int, path: str, pipe: "Connection[Any, Any]") -> None:
    """Each check by name that did not hold, and why; the ranks may be apart after one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    assert group is not None
    problems: dict[str, str] = {}
    for check in CHECKS:
        try:
            check(rank, group)
        except (AssertionError, RuntimeError, ValueError, TypeError, pytest.fail.Exception) as error:
            problems |= {left.__name__: f"{error!r} in {check.__name__}" for left in CHECKS[CHECKS.index(check) :]}
            break
    pipe.send(problems)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    path = tmp_path_factory.mktemp("ranks") / "store"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(WORLD)]
    ranks = [context.Process(target=partial(rank_main, r, str(path), pipes[r][1]), daemon=True) for r in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        assert all(pipe.poll(120) for pipe, _ in pipes)
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_three_ranks(problems: list[dict[str, str]], check: str) -> None:
    assert [found.get(check) for found in problems] == [None] * WORLD


def test_other_devices_and_versions_are_refused() -> None:
    assert refusal("0.32.0", cpu=True) is None
    assert refusal("0.32.1.post1", cpu=True) is None
    assert "no accelerator has run it: leave it off" in str(refusal("0.32.0", cpu=False))
    for version in ("0.31.2", "0.33.0"):
        assert f"for vLLM >=0.32.0,<0.33, and {version} is installed" in str(refusal(version, cpu=True))


def test_a_copy_is_told_which_it_is() -> None:
    told = variables({"rank": 1, "size": 2, "port": 4567})
    assert told["VLLM_DP_RANK"] == told["VLLM_DP_RANK_LOCAL"] == "1"
    assert (told["VLLM_DP_SIZE"], told["VLLM_DP_MASTER_PORT"]) == ("2", "4567")
    assert (told["VLLM_DP_MASTER_IP"], told["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
