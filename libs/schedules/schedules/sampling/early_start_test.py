"""Samplers that begin before they are called for: used once, for what they began with, and never left behind."""

from collections.abc import Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from typing import Any, cast

import pytest

from rollout import TaskRow
from schedules.sampling.early_start import begin_early, build_beside
from schedules.sampling.settings import RolloutSettings


class Begun:
    """Stands for samplers."""

    def __init__(self, version: int, place: Mapping[str, Any] | None) -> None:
        self.asked = (version, place)
        self.closed = 0
        self.ready: Future[Any] = Future()
        self.ready.set_result(None)

    def close(self) -> None:
        self.closed += 1


class Start:
    """Stands for what starts them."""

    settings = cast(RolloutSettings, type("Settings", (), {"prompts_per_step": 2}))
    module_names = True

    def __init__(self) -> None:
        self.made: list[Begun] = []

    def begin(self, version: int, place: Mapping[str, Any] | None) -> Any:
        self.made.append(Begun(version, place))
        return self.made[-1]

    def __call__(self, version: int, place: Mapping[str, Any] | None, wait: Any) -> Any:
        return self.begin(version, place)


class Numbers:
    """Tasks that know where they are."""

    at = 0

    def cursor(self) -> dict[str, Any]:
        return {"at": self.at}

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        raise AssertionError("none is asked for before its time")


FIRST = {"step": 0, "cursor": {"at": 0}}


def test_the_first_call_gets_what_has_begun_and_later_ones_others() -> None:
    start = Start()
    with ExitStack() as stack:
        early: Any = begin_early(cast(Any, start), cast(Any, Numbers()), stack, early=True)
        assert [one.asked for one in start.made] == [(0, FIRST)]
        assert early(0, FIRST, wait) is start.made[0]
        assert early(0, FIRST, wait) is start.made[1]
        assert (early.module_names, early.settings) == (True, Start.settings)
    assert [one.closed for one in start.made] == [0, 0]  # they are whose who called for them


@pytest.mark.parametrize("asked", [(1, FIRST), (0, {"step": 2, "cursor": {"at": 4}}), (0, None)])
def test_what_has_begun_with_another_version_or_place_is_ended(asked: tuple[int, Any]) -> None:
    start = Start()
    with ExitStack() as stack:
        early: Any = begin_early(cast(Any, start), cast(Any, Numbers()), stack, early=True)
        assert early(*asked, wait) is start.made[1]
    assert start.made[1].asked == asked
    assert [one.closed for one in start.made] == [1, 0]


def test_what_nobody_called_for_is_ended_and_a_late_start_begins_nothing() -> None:
    start = Start()
    with ExitStack() as stack:
        begin_early(cast(Any, start), cast(Any, Numbers()), stack, early=True)
    assert [one.closed for one in start.made] == [1]
    with ExitStack() as stack:
        assert begin_early(cast(Any, start), cast(Any, Numbers()), stack, early=False) is start
    assert len(start.made) == 1


class Starting:
    """A sampler that is starting."""

    def __init__(self, order: list[str]) -> None:
        self.order = order

    def wait_until_ready(self) -> None:
        self.order.append("waited for")


@pytest.mark.parametrize("shares", [False, True])
def test_a_sampler_is_waited_for_after_training_is_built_but_where_they_share_a_device(shares: bool) -> None:
    order: list[str] = []

    def build(found: str | None) -> str:
        order.append(f"built of {found}")
        return "trainer"

    def read() -> str:
        order.append("read")
        return "a model"

    made = build_beside(Starting(order), read, build, lambda: order.append("ready"), shares)
    waits = ["waited for", "ready"]
    assert made == "trainer"
    assert order == (["read", *waits, "built of a model"] if shares else ["read", "built of a model", *waits])
    order.clear()
    assert build_beside(None, read, build, lambda: order.append("ready"), shares) == "trainer"
    assert sorted(order) == ["built of None", "ready"]
