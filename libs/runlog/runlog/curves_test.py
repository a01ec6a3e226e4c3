"""Curves: what becomes a chart, thinning, smoothing, the headline."""

import pytest

from runlog.curves import charts, downsample, key_figures, kind_of, noisy, smooth, unchanged

RUN = [
    {"step": s, "time": 1000.0 + 2 * s, "reward": s / 10, "loss": 1.0, "train/kl": 0.1 * s, "constant": 3, "odd": s % 3,
     "note": "x", "tokens_per_second": 100 * s, "flag": True, "missing": None,
     **({"eval/accuracy": 0.5 + s / 100} if s in (1, 10) else {})}
    for s in range(1, 11)
]  # fmt: skip


def test_known_kinds_come_first_in_their_order_then_the_rest_by_name() -> None:
    made = charts(RUN, 100)
    assert [c["title"] for c in made] == ["Reward", "Held-out accuracy", "KL", "Throughput", "odd"]
    held = made[1]
    assert held["marks"]
    assert (held["x"], held["y"]) == ([1, 10], [0.51, 0.6])


def test_a_name_with_a_prefix_is_known_by_its_last_part() -> None:
    known = kind_of("train/grad_norm")
    assert known is not None
    assert known.title == "Gradient norm"
    assert kind_of("grad_norms") is None


def test_a_part_of_the_name_is_in_the_title() -> None:
    rows = [{"step": s, "tool/search/errors": 0.1 * s, "reward/part/format": s, "tool//errors": s} for s in range(3)]
    assert [c["title"] for c in charts(rows, 9)] == ["Reward part, format", "Errors of search", "tool//errors"]


def test_what_people_look_at_first_is_there_though_it_never_changes() -> None:
    """Every episode cut off, at every step; each call of a tool an error."""
    rows = [{"step": s, "response/truncated": 1.0, "entropy": 0.0, "reward": s, "tool/search/errors": 1.0,
             "tool/search/calls": 2.0, "eval/reward/Guess": 1, "b": 1, "a": 0} for s in range(3)]  # fmt: skip
    made = charts(rows, 9)
    assert [(c["title"], c["last"]) for c in made] == [("Reward", "2"), ("Entropy", "0"), ("Truncated", "100.0 %")]
    told = [("Held-out reward, Guess", "1"), ("Calls of search", "2"), ("Errors of search", "100.0 %")]
    assert unchanged(rows) == [*told, ("a", "0"), ("b", "1")]
    assert unchanged(RUN) == [("Loss", "1"), ("constant", "3")]


def test_an_environments_share_is_no_reward() -> None:
    rows = [{"step": 1, "reward/environment/Guess/share": 0.75, "reward/environment/Guess": 0.5,
             "eval/reward/Guess/share": 0.5, "eval/reward/Guess": 0.25}]  # fmt: skip
    told = [("Held-out share of Guess", "50.0 %"), ("Held-out reward, Guess", "0.25")]
    assert unchanged(rows) == [*told, ("Share of Guess", "75.0 %"), ("Reward, Guess", "0.5")]


def test_rounding_is_no_curve_to_put_in_front() -> None:
    rows = [{"step": s, "loss": 1e-13 * (-1) ** s, "kl": 0.01 * s, "lr": 1e-7 * s} for s in range(3)]
    assert [(c["name"], c["rounding"]) for c in charts(rows, 9)] == [("kl", False), ("lr", False), ("loss", True)]


def test_thinning_keeps_the_mean_and_the_last_step() -> None:
    steps, values = list(range(1000)), [float(i % 7) for i in range(1000)]
    xs, ys = downsample(steps, values, 100)
    assert len(xs) == len(ys) == 100
    assert xs[-1] == 999
    assert sum(ys) / 100 == pytest.approx(sum(values) / 1000)
    assert downsample(steps[:50], values[:50], 100) == (steps[:50], values[:50])


def test_smoothing_has_no_pull_towards_the_start() -> None:
    assert smooth([2.0] * 20, 5) == pytest.approx([2.0] * 20)
    assert smooth([1.0, 3.0], 1) == pytest.approx([1.0, 3.0])


def test_only_noise_is_smoothed() -> None:
    ramp = [min(i / 10, 1.0) for i in range(100)]
    assert not noisy(ramp)
    assert noisy([x + (i % 2) for i, x in enumerate(ramp)])
    assert not noisy([0.0, 1.0] * 5)
    assert not noisy([1.0] * 50)


def test_the_headline() -> None:
    tiles = {t["label"]: t for t in key_figures(RUN, 12)}
    assert tiles["Held-out accuracy"]["value"] == "60.0 %"
    assert tiles["Held-out accuracy"]["note"] == "51.0 % before, +9.0 points"
    assert tiles["Reward"]["value"] == "1"
    assert tiles["Tokens per second"]["value"] == "600"
    assert tiles["Time"]["value"] == "0:18"
    assert tiles["Steps"]["note"] == "12 episodes kept"


def test_a_run_of_one_row_has_a_headline() -> None:
    assert [t["label"] for t in key_figures([{"step": 1, "loss": 2.0}], 0)] == ["Steps"]


def test_the_headline_of_fine_tuning_is_the_held_out_loss() -> None:
    tiles = key_figures([{"step": 0, "eval/loss": 2.5}, {"step": 9, "eval/loss": 0.75}], 0)
    assert tiles[0] == {"label": "Held-out loss", "value": "0.75", "note": "2.5 before"}
    assert tiles[1]["note"] == "no episodes kept"
