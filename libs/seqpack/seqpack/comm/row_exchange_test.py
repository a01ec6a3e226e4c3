"""Rows between real processes: what arrives, to the bit, and how many bytes the kernel saw of it."""

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from seqpack.comm.collectives import broadcast_bytes, broadcast_plain, gather_bytes, gather_plain
from seqpack.comm.row_exchange import Column, columns_of, exchange_rows, flatten_row, row_bytes, unflatten_row
from seqpack.comm.row_plan import RowPlan
from seqpack.testing.ranks import on_ranks

DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool, torch.float32, torch.float64, torch.bfloat16)


def row_of(number: int) -> dict[str, Tensor]:
    """A row of a few tensors, told by its number alone: its length too, and whether it has images."""
    generator = torch.Generator().manual_seed(number)
    length = 1 + number * 7 % 50
    row = {
        "input_ids": torch.randint(0, 2**31 - 1, (length,), generator=generator, dtype=torch.int32),
        "log_probs": torch.randn(length, generator=generator),
    }
    if number % 3 == 0:
        row["pixel_values"] = torch.randn(number % 4, 5, generator=generator).bfloat16()
    return row


def sent_over_loopback() -> int:
    """The bytes that this network namespace has sent over loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])


def exchanged(holders: list[int], wanted: list[list[int]]) -> tuple[list[int], bool]:
    """The rows that a rank got, and whether each is the one."""
    rank, rows = dist.get_rank(), {number: row_of(number) for number in range(len(holders))}
    columns = {number: columns_of(row) for number, row in rows.items()}
    plan = RowPlan.of(holders, [row_bytes(columns[number]) for number in rows], wanted)

    def own(number: int) -> Tensor:
        assert holders[number] == rank
        return flatten_row(rows[number])

    found = exchange_rows(plan, own)
    read = {number: unflatten_row(flat, columns[number]) for number, flat in found.items()}
    same = all(
        tensors.keys() == rows[number].keys()
        and all(torch.equal(tensors[name], rows[number][name]) for name in tensors)
        for number, tensors in read.items()
    )
    return sorted(found), same


@pytest.mark.parametrize("world", [2, 4])
def test_each_rank_gets_its_rows_to_the_bit(world: int) -> None:
    generator = random.Random(world)
    for copies in (0, 1, world):
        holders = [generator.randrange(world) for _ in range(30)]
        needing = [generator.sample(range(world), copies) for _ in holders]
        wanted = [[row for row, ranks in enumerate(needing) if rank in ranks] for rank in range(world)]
        for rank, (rows, same) in enumerate(on_ranks(world, exchanged, holders, wanted)):
            assert rows == wanted[rank]
            assert same


def test_ranks_that_have_all_that_they_need_exchange_nothing() -> None:
    found = on_ranks(2, exchanged, [0, 1, 0], [[0, 2], [1]])
    assert [rows for rows, _ in found] == [[0, 2], [1]]
    assert all(same for _, same in found)


def large(world: int, rows: int, tokens: int) -> tuple[int, int]:
    """The plan's bytes and the fewest on the wire in three tries (others may use it), of rows for the next rank."""
    holders = [row % world for row in range(rows)]
    wanted = [[row for row in range(rows) if (row + 1) % world == rank] for rank in range(world)]
    plan = RowPlan.of(holders, [4 * tokens] * rows, wanted)
    tries = []
    for _ in range(3):
        dist.barrier()
        before = sent_over_loopback()
        dist.barrier()
        exchange_rows(plan, lambda row: torch.full((4 * tokens,), row, dtype=torch.uint8))
        dist.barrier()
        tries.append(sent_over_loopback() - before)
    return plan.total_bytes, min(tries)


def test_the_wire_carries_the_bytes_of_the_plan() -> None:
    """Counted by the kernel: the rows once, whatever the ranks, and some thousand bytes of heads and barriers."""
    for world in (2, 4):
        for planned, wire in on_ranks(world, large, world, 16, 2**17):
            assert planned == 16 * 2**19
            assert planned <= wire < 1.05 * planned


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
def test_a_row_comes_back_from_its_bytes(shapes: list[tuple[torch.dtype, list[int]]]) -> None:
    row = {str(n): torch.ones(shape).mul(n + 1).to(dtype) for n, (dtype, shape) in enumerate(shapes)}
    flat, columns = flatten_row(row), columns_of(row)
    assert len(flat) == row_bytes(columns)
    read = unflatten_row(flat, columns)
    assert read.keys() == row.keys()
    for name, tensor in read.items():
        assert (tensor.dtype, tensor.shape) == (row[name].dtype, row[name].shape)
        assert torch.equal(tensor, row[name])


def test_bytes_of_another_row_are_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes are no row of 8"):
        unflatten_row(torch.zeros(16, dtype=torch.uint8), [Column("a", torch.int32, (1,))])
    plan = RowPlan.of([0], [8], [[0]])
    with pytest.raises(ValueError, match="the plan says 8 bytes"):
        exchange_rows(plan, lambda _: torch.zeros(16, dtype=torch.uint8))


def plain() -> Any:
    rank = dist.get_rank()
    mine = {"rank": rank, "none": None, "tuple": (1, "a"), "nan": [math.inf]} if rank else ()
    return [
        gather_plain(mine),
        gather_bytes(b"x" * 5 if rank == 1 else b""),
        gather_bytes(b""),
        broadcast_plain(("from", rank), src=1),
        broadcast_bytes(bytes([rank]) * 3),
    ]


def test_plain_values_of_all_ranks_are_on_each() -> None:
    other = {"rank": 1, "none": None, "tuple": (1, "a"), "nan": [math.inf]}
    expected = [[(), other], [b"", b"xxxxx"], [b"", b""], ("from", 1), b"\0\0\0"]
    assert on_ranks(2, plain) == [expected] * 2
