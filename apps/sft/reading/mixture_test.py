"""The order of a run, for any sizes, weights and place to go on from."""

from collections import Counter
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from apps.sft.reading.mixture import Mixture

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4).map(tuple)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    sizes = draw(SIZES)
    weights = draw(st.none() | st.tuples(*[st.floats(0.2, 5) for _ in sizes]))
    try:
        return Mixture(sizes, weights, draw(st.integers(0, 5)))
    except ValueError:
        assume(False)


@given(mixtures(), st.lists(st.integers(0, 300), min_size=2, max_size=6))
def test_the_order_does_not_depend_on_where_a_run_stopped(mixture: Mixture, cuts: list[int]) -> None:
    cuts = sorted(cuts)
    parts = [mixture.at(first, end) for first, end in pairwise(cuts)]
    assert [i for part in parts for i in part] == mixture.at(cuts[0], cuts[-1])


@given(SIZES, st.integers(0, 5), st.integers(0, 3))
def test_without_weights_an_epoch_reads_every_sample_once(sizes: tuple[int, ...], seed: int, epoch: int) -> None:
    mixture = Mixture(sizes, None, seed)
    n = len(mixture)
    assert sorted(mixture.at(epoch * n, (epoch + 1) * n)) == list(range(n))


@given(mixtures(), st.integers(1, 4))
def test_every_epoch_has_the_shares_asked_for_and_no_sample_comes_early(mixture: Mixture, epochs: int) -> None:
    n, starts = len(mixture), list(accumulate(mixture.sizes, initial=0))
    drawn = Counter(mixture.at(0, epochs * n))
    for file, size in enumerate(mixture.sizes):
        counts = [drawn[i] for i in range(starts[file], starts[file] + size)]
        assert max(counts) - min(counts) <= 1
        assert sum(counts) == epochs * mixture.places[file]
        if mixture.weights is not None:
            assert abs(mixture.places[file] - n * mixture.weights[file] / sum(mixture.weights)) < 1


@given(st.integers(0, 10))
def test_epochs_and_seeds_have_orders_of_their_own(seed: int) -> None:
    mixture = Mixture((40,), None, seed)
    assert mixture.at(0, 40) != mixture.at(40, 80)
    assert mixture.at(0, 40) != Mixture((40,), None, seed + 1).at(0, 40)
    weighted = Mixture((40, 40), (1.0, 3.0), seed)
    assert [i < 40 for i in weighted.at(0, 80)] != [i < 40 for i in weighted.at(80, 160)]


def test_a_share_below_one_sample_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the weight 0\.001 of file 2 of --data is less than one sample"):
        Mixture((5, 5), (1.0, 0.001), 0)
