"""The picture of a plan has a box for every group, as wide as its time and as high as its ranks."""

import re
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest

from dyncp.planning.timeline import LEFT, PALETTE, TOP, WIDTH, timeline_html
from dyncp.planning.types import DynamicPlan, Group, Step

STEPS = (Step((Group((0, 1), (1,)), Group((2,), (0,)))), Step((Group((0,), (2,)), Group((1, 2), ()))))
PLAN = DynamicPlan((5, 9, 2), 3, 10, STEPS, seconds=(0.03, 0.01), lower_bound=0.032, name="a<b")
BOX = re.compile(
    r'<g><title>(.*?)</title><rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" '
    r'fill="(.*?)" fill-opacity="([\d.]+)" rx="3"/><text x="([\d.]+)" y="([\d.]+)" class="l">(.*?)</text></g>'
)


# title, x, y, width, height, fill, opacity, x and y of the text, the text
Drawn = tuple[str, float, float, float, float, str, float, float, float, str]


def boxes(plan: DynamicPlan) -> list[Drawn]:
    return [
        cast(
            Drawn,
            (title, *map(float, numbers[:4]), numbers[4], float(numbers[5]), *map(float, numbers[6:8]), numbers[8]),
        )
        for title, *numbers in BOX.findall(timeline_html(plan))
    ]


def test_boxes_are_groups() -> None:
    drawn = boxes(PLAN)
    assert [box[0] for box in drawn] == [
        "ranks 0-1: 5 tokens each (50% of the cap); samples [1], lengths [9]",
        "rank 2: 5 tokens each (50% of the cap); samples [0], lengths [5]",
        "rank 0: 2 tokens each (20% of the cap); samples [2], lengths [2]",
        "ranks 1-2: 0 tokens each (0% of the cap); no samples: a dummy",
    ]
    room, row = WIDTH - LEFT - 20, 26.0
    assert [box[1] for box in drawn] == pytest.approx(
        [LEFT + 1, LEFT + 1, LEFT + 0.75 * room + 1, LEFT + 0.75 * room + 1]
    )
    assert [box[3] for box in drawn] == pytest.approx([0.75 * room - 2] * 2 + [0.25 * room - 2] * 2, abs=0.06)
    assert [box[2] for box in drawn] == [TOP + 1, TOP + 2 * row + 1, TOP + 1, TOP + row + 1]
    assert [box[4] for box in drawn] == [2 * row - 2, row - 2, row - 2, 2 * row - 2]
    assert [box[5] for box in drawn] == [PALETTE[1], PALETTE[0], PALETTE[0], "#ddd"]
    assert [box[6] for box in drawn] == pytest.approx([0.625, 0.625, 0.4, 0.25], abs=0.01)
    assert [box[9] for box in drawn] == ["2 x 5", "1 x 5", "1 x 2", ""]
    for _, x, y, _, height, _, _, text_x, text_y, _ in drawn:
        assert (text_x, text_y) == pytest.approx((x + 5, y - 1 + (height + 2) / 2 + 4), abs=0.11)


def test_the_page_says_what_it_shows() -> None:
    page = timeline_html(PLAN)
    assert "<h1>a&lt;b: 3 sequences over 3 ranks</h1>" in page
    assert "16 tokens in 2 steps, 40.0 ms predicted, at most 25.0% over the fastest plan; at most 10 tokens" in page
    assert f"27% of the slots filled; ring, contiguous; plan {PLAN.hash}" in page
    assert f'<svg width="{WIDTH}" height="{TOP + 3 * 26 + 30}"' in page
    assert re.findall(r'y="([\d.]+)" text-anchor="end" class="s">rank (\d+)<', page) == [
        (f"{TOP + rank * 26 + 17:.1f}", str(rank)) for rank in range(3)
    ]
    assert re.findall(r'class="s">step (\d)<', page) == ["0", "1"]
    untimed = timeline_html(replace(PLAN, seconds=(), lower_bound=0.0))
    assert "predicted" not in untimed
    assert "fastest plan" not in untimed


def test_steps_without_times_are_equally_wide() -> None:
    widths = [box[3] for box in boxes(replace(PLAN, seconds=()))]
    assert widths == pytest.approx([(WIDTH - LEFT - 20) / 2 - 2] * 4)


def test_many_ranks_stay_on_the_page() -> None:
    groups = tuple(Group((rank,), ()) for rank in range(400))
    page = timeline_html(DynamicPlan((), 400, 4, (Step(groups),)))
    assert f'height="{TOP + 400 * 4 + 30}"' in page
    ranks = [int(rank) for rank in re.findall(r">rank (\d+)<", page)]
    assert ranks == list(range(0, 400, 4))
    tops = [float(y) for y in re.findall(r'<rect x="[\d.]+" y="([\d.]+)"', page)]
    assert {b - a for a, b in pairwise(tops)} == {4.0}
