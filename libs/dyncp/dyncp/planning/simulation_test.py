"""Replays add up the times of the plans they stand for; traces are what their names say."""

import json
from pathlib import Path

import numpy as np
import pytest

from dyncp.planning.cost import CostModel
from dyncp.planning.planner import plan, static_plan
from dyncp.planning.simulation import Replay, markdown, replay, simulate, trace_lengths

BATCHES = [[30, 5, 7, 12, 3, 9], [16, 16, 8], [11] * 9]


def test_a_replay_is_the_sum_of_its_plans() -> None:
    found = replay(BATCHES, 6, 16)
    made = [plan(lengths, 6, 16) for lengths in BATCHES]
    assert (found.ranks, found.sequences, found.tokens) == (6, 18, 66 + 40 + 99)
    assert found.dynamic == pytest.approx(sum(sum(one.seconds) for one in made))
    assert found.chosen == {name: [m.name for m in made].count(name) for name in {m.name for m in made}}
    assert set(found.static) == {2, 6}  # of the sizes that hold 30 tokens, powers of two and the world
    for size, seconds in found.static.items():
        assert seconds == pytest.approx(sum(sum(static_plan(b, 6, 16, size).seconds) for b in BATCHES))
    assert found.best_static == min(found.static, key=found.static.__getitem__)
    assert found.speedup == pytest.approx(min(found.static.values()) / found.dynamic)
    assert found.speedup >= 1


def test_the_arguments_reach_the_plans() -> None:
    cost = CostModel(delta_layers=0, fixed=1.0, query_heads=4)
    found = replay(BATCHES, 4, 16, cost, None, "ulysses", "zigzag")
    assert found.dynamic == pytest.approx(
        sum(sum(plan(b, 4, 16, cost, method="ulysses", layout="zigzag").seconds) for b in BATCHES)
    )


def test_without_a_static_size_there_is_nothing_to_compare() -> None:
    none = Replay(3, 2, 10, 0.5, {}, {"dynamic": 1})
    assert none.best_static is None
    assert none.speedup == float("inf")
    table = markdown([none, Replay(4, 8, 1000, 0.5, {2: 1.0, 4: 0.75}, {"static-4": 1, "dynamic": 2})]).splitlines()
    assert [line.count("|") for line in table] == [9] * 4
    assert table[2] == "| 3 | 2 | 20 | none fits | - | 500.0 ms | inf | dynamic x1 |"
    assert table[3] == "| 4 | 8 | 2,000 | CP 4 | 750.0 ms | 500.0 ms | 1.50 | dynamic x2, static-4 x1 |"


def test_traces_have_the_shape_of_their_names(tmp_path: Path) -> None:
    for trace in ("lognormal", "bimodal", "uniform"):
        lengths = trace_lengths(trace, 4000, 3200, seed=3)
        assert lengths == trace_lengths(trace, 4000, 3200, seed=3) != trace_lengths(trace, 4000, 3200, seed=4)
        assert len(lengths) == 4000
        assert 1 <= min(lengths) < max(lengths) <= 3200
        assert all(isinstance(length, int) for length in lengths)
    drawn = {trace: np.array(trace_lengths(trace, 4000, 3200)) for trace in ("lognormal", "bimodal", "uniform")}
    assert np.median(drawn["lognormal"]) == pytest.approx(200, rel=0.1)
    assert np.log(drawn["lognormal"][drawn["lognormal"] < 3200]).std() == pytest.approx(1.15, abs=0.1)
    long = drawn["bimodal"] == 2560
    assert long.mean() == pytest.approx(0.1, abs=0.02)
    assert drawn["bimodal"][~long].mean() == pytest.approx(100, rel=0.05)
    assert drawn["bimodal"][~long].std() == pytest.approx(32, rel=0.1)
    assert drawn["uniform"].mean() == pytest.approx(1600, rel=0.05)
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([5, 90, 7]))
    assert trace_lengths(str(file), 5, 50) == [5, 50, 7, 5, 50]
    with pytest.raises(ValueError, match="neither a file nor one of lognormal, bimodal, uniform"):
        trace_lengths("nothing", 1, 1)


def test_a_simulation_draws_as_many_as_the_ranks_ask_for() -> None:
    small, large = simulate([2, 16], 32, "uniform", sequences_per_rank=4, batches=3)
    assert [(r.ranks, r.sequences) for r in (small, large)] == [(2, 24), (16, 192)]
    drawn = [trace_lengths("uniform", 8, 64, seed) for seed in range(3)]  # two ranks hold 64 tokens, not four times 32
    assert small == replay(drawn, 2, 32)
    assert large == replay([trace_lengths("uniform", 64, 128, seed) for seed in range(3)], 16, 32)
    (given,) = simulate([4], 32, longest=40, batches=1)
    assert given == replay([trace_lengths("lognormal", 32, 40)], 4, 32)
