"""The sample of a report: whole groups, each with the same chance."""

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runlog.run import RunLog
from runlog.sampling import Sample, draw_groups, ordered
from runlog.store import encode


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(encode(ordered(row)) for row in rows), encoding="utf-8")
    return path


def drawn(sample: Sample) -> list[list[dict[str, Any]]]:
    return [[row for _, row in group] for group in sample.groups]


def test_a_group_is_drawn_whole(tmp_path: Path) -> None:
    rows = [{"step": s, "group": g, "n": n} for s in range(50) for n in range(4) for g in range(3)]
    sample = draw_groups(write(tmp_path / "a", rows), 20)
    assert sample.logged == 600
    assert len(sample.groups) == 20
    for group in drawn(sample):
        assert len({(row["step"], row["group"]) for row in group}) == 1
        assert [row["n"] for row in group] == [0, 1, 2, 3]


def test_fewer_groups_than_wanted_are_all_drawn_and_the_same_log_gives_the_same_sample(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [{"step": s, "group": 0} for s in range(9)])
    assert len(draw_groups(path, 20).groups) == 9
    assert draw_groups(path, 4, seed=3) == draw_groups(path, 4, seed=3)
    assert draw_groups(path, 4, seed=3) != draw_groups(path, 4, seed=4)
    assert draw_groups(tmp_path / "absent", 5).groups == []


def test_every_group_has_the_same_chance(tmp_path: Path) -> None:
    """4 of 20 groups, 2,000 draws: each is drawn 400 times, give or take five deviations of 18."""
    path = write(tmp_path / "a", [{"step": s, "group": 1, "reward": float(s < 3)} for s in range(20)])
    counts = Counter(row["step"] for seed in range(2000) for (row,) in drawn(draw_groups(path, 4, seed=seed)))
    assert all(abs(counts[step] - 400) < 90 for step in range(20))
    first = Counter(drawn(draw_groups(path, 4, seed=seed))[0][0]["step"] for seed in range(2000))
    assert all(abs(first[step] - 100) < 50 for step in range(20))  # the first drawn are a sample too


def test_splits_are_drawn_apart_and_rows_without_a_group_stand_alone(tmp_path: Path) -> None:
    rows = [{"step": 1, "n": n} for n in range(5)] + [{"step": 1, "split": "held-out", "group": g} for g in range(3)]
    path = write(tmp_path / "a", rows)
    assert [len(group) for group in draw_groups(path, 10).groups] == [1] * 5
    held = draw_groups(path, 10, "held-out")
    assert (held.logged, len(held.groups)) == (3, 3)


texts = st.text(max_size=5)
episodes = st.fixed_dictionaries(
    {"step": st.integers(0, 5)},
    optional={
        "split": st.sampled_from(["training", "held-out"]),
        "environment": texts,
        "group": st.one_of(st.integers(0, 3), texts),
        "text": texts,
    },
)


@given(st.lists(episodes, max_size=12), st.randoms())
def test_every_row_is_in_exactly_one_group_of_its_split(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], rng: random.Random
) -> None:
    """Whatever stands in the line, and in whatever order: the head that is read by a pattern agrees with the row."""
    path = tmp_path_factory.mktemp("rows") / "a"
    shuffled = [dict(rng.sample(list(row.items()), len(row))) for row in rows]
    lines = [encode(row if rng.random() < 0.5 else ordered(row)) for row in shuffled]
    path.write_text("".join(lines) + '{"step": 1, "cut', encoding="utf-8")
    found = [draw_groups(path, 100, split) for split in ("training", "held-out")]
    numbers = sorted(number for sample in found for group in sample.groups for number, _ in group)
    assert numbers == list(range(len(rows)))
    for sample, split in zip(found, ("training", "held-out"), strict=True):
        for group in drawn(sample):
            keys = {(r["step"], r.get("split", "training"), r.get("environment"), r.get("group")) for r in group}
            assert len(keys) == 1
            assert keys.pop()[1] == split


def test_a_log_writes_what_the_sampling_reads(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        log.episode({"tokens": ["x"], "group": 2, "step": 1})
    assert (
        (tmp_path / "episodes.jsonl")
        .read_text()
        .startswith('{"step":1,"split":"training","environment":null,"group":2,')
    )


def test_a_broken_line_of_a_drawn_group_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text('{"step":1,"split":"training","environment":null,"group":1,nonsense\n')
    with pytest.raises(ValueError, match="line 1"):
        draw_groups(tmp_path / "a", 3)
    assert json.loads(encode({"a": 1})) == {"a": 1}
