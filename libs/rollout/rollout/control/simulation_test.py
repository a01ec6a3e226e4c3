"""The simulation against sums that can be done by hand, laws that hold for every run, and its own controller."""

import itertools

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from rollout.control.settings import StalenessSettings
from rollout.control.simulation import Workload, choose_pools, forecast_table, in_turn, simulate

EVEN = Workload((100,), group_size=2, decode_s=0.01, row_s=0.0, train_s=0.5, token_s=0.0, sync_s=0.25)


def test_a_run_in_turn_is_the_sum_of_its_parts() -> None:
    forecast = simulate(StalenessSettings(4, 3), EVEN)
    assert forecast.seconds == pytest.approx(3 * (1.0 + 0.5 + 0.25))
    assert forecast.tokens == 3 * 4 * 2 * 100
    assert forecast.staleness == (0, 0, 0)
    assert forecast.generating == pytest.approx(1.0 / 1.75)
    assert forecast.training == pytest.approx(0.5 / 1.75)


def test_training_hides_behind_sampling_where_it_may() -> None:
    """Both windows begin at once; then a step is trained and handed over while the next one's answers come."""
    settings = StalenessSettings(4, 4, staleness_threshold=1.0, partial_rollout=True)
    forecast = simulate(settings, EVEN)
    assert forecast.seconds < 0.75 * simulate(in_turn(settings), EVEN).seconds
    assert max(forecast.staleness) == 1


def test_rows_slow_one_another_down_and_slots_make_them_wait() -> None:
    settings = StalenessSettings(1, 1)
    slow = Workload((10,), group_size=4, decode_s=1.0, row_s=0.5, train_s=0.0, token_s=0.0, sync_s=0.0)
    assert simulate(settings, slow).seconds == pytest.approx(10 * 3.0)
    two = Workload((10,), group_size=4, slots=2, decode_s=1.0, row_s=0.5, train_s=0.0, token_s=0.0, sync_s=0.0)
    assert simulate(settings, two).seconds == pytest.approx(2 * 10 * 2.0)
    assert simulate(settings, slow, generators=2).seconds == pytest.approx(10 * 2.0)


def test_an_answer_that_ends_lets_the_others_go_faster() -> None:
    settings = StalenessSettings(1, 1)
    found = {
        simulate(
            settings,
            Workload((1, 3), group_size=2, decode_s=1.0, row_s=1.0, train_s=0.0, token_s=0.0, sync_s=0.0),
            seed=seed,
        ).seconds
        for seed in range(20)
    }
    assert found == {3.0, 9.0, 3.0 + 2 * 2.0}  # both short, both long, one of each


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=12),
    batch=st.integers(1, 4),
    steps=st.integers(1, 5),
    threshold=st.sampled_from([0.0, 0.5, 1.0, 2.5]),
    partial=st.booleans(),
    pools=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_laws_of_every_forecast(
    lengths: list[int], batch: int, steps: int, threshold: float, partial: bool, pools: tuple[int, int]
) -> None:
    settings = StalenessSettings(batch, steps, threshold, partial_rollout=partial)
    workload = Workload(tuple(lengths), group_size=3, slots=4, decode_s=0.01, row_s=0.002, train_s=0.1, sync_s=0.05)
    forecast = simulate(settings, workload, pools[0], pools[1], seed=3)
    same = simulate(settings, workload, pools[0], pools[1], seed=3)
    assert forecast == same
    assert len(forecast.staleness) == steps
    assert max(forecast.staleness) <= settings.bound
    assert forecast.tokens == simulate(in_turn(settings), workload, seed=3).tokens  # the same work
    assert 0 < forecast.training <= 1
    assert 0 < forecast.generating <= 1 + 1e-9
    assert max(span.end for span in forecast.spans) == pytest.approx(forecast.seconds)
    for lane in ("trainer", "weights", "sampler"):
        spans = sorted(span[2:] for span in forecast.spans if span.lane == lane)
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(spans))
    serial = sum(span.end - span.begin for span in forecast.spans if span.lane != "sampler")
    assert forecast.seconds >= serial - 1e-9  # training and transfers never overlap one another


def test_the_split_of_a_cluster_follows_the_work() -> None:
    """Where sampling costs three times what training does, most devices sample."""
    settings = StalenessSettings(8, 6, staleness_threshold=1.0, partial_rollout=True)
    sampling = Workload(tuple(range(20, 400, 20)), slots=4, decode_s=0.01, token_s=0.00002)
    training = Workload(tuple(range(20, 400, 20)), slots=64, decode_s=0.001, token_s=0.002)
    assert choose_pools(settings, sampling, 8)[0].generators >= 5
    assert choose_pools(settings, training, 8)[0].trainers >= 5
    table = forecast_table(choose_pools(settings, training, 4))
    assert len(table.splitlines()) == 4
    assert "staleness" in table


def test_what_cannot_be_simulated_is_refused() -> None:
    for change, says in (
        ({"lengths": ()}, "lengths are counts"),
        ({"lengths": (0,)}, "lengths are counts"),
        ({"lengths": (1,), "slots": 0}, "at least 1"),
        ({"lengths": (1,), "decode_s": 0.0}, "above 0"),
        ({"lengths": (1,), "sync_s": -1.0}, "at least 0"),
    ):
        with pytest.raises(ValueError, match=says):
            Workload(**change)
    with pytest.raises(ValueError, match="at least 2 devices"):
        choose_pools(StalenessSettings(1, 1), EVEN, 1)
    with pytest.raises(ValueError, match="0 generators"):
        simulate(StalenessSettings(1, 1), EVEN, generators=0)
