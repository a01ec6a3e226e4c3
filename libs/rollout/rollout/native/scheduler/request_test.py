"""Random numbers of requests: a stream a seed and a seed a request, whichever way they are drawn."""

from itertools import islice

import pytest
import torch

from rollout.engine import Sampling
from rollout.native.scheduler.request import seeds_of, uniforms_of


@pytest.mark.parametrize("count", [1, 8, 63, 64, 65, None])
def test_a_stream_is_its_generators_whatever_its_length(count: int | None) -> None:
    taken = count or 200
    expected = torch.rand(taken, dtype=torch.float64, generator=torch.Generator().manual_seed(2**62 + 3)).tolist()
    other = uniforms_of(5, count)
    next(other)  # streams beside each other do not mix
    stream = uniforms_of(2**62 + 3, count)
    drawn = [next(stream)]
    next(uniforms_of(7, count))
    assert [*drawn, *islice(stream, taken - 1)] == expected


def test_seeds_are_those_that_requests_draw_one_by_one() -> None:
    settings = [Sampling(), Sampling(seed=3), Sampling(greedy=True), Sampling(), Sampling(seed=0), Sampling()]
    one_by_one = torch.Generator().manual_seed(11)
    drawn = [int(torch.randint(2**63 - 1, (), generator=one_by_one)) for _ in range(3)]
    together = torch.Generator().manual_seed(11)
    assert seeds_of(settings, together) == [drawn[0], 3, 0, drawn[1], 0, drawn[2]]
    assert torch.equal(together.get_state(), one_by_one.get_state())
    assert seeds_of([], together) == []
