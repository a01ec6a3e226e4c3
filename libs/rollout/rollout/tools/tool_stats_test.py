"""Calls, errors and timeouts of tools, counted from what is said."""

from rollout.tools.tool_stats import ToolStats, summed_metrics


def tool(text: str, call_id: str | None = None, name: str | None = None) -> dict[str, str]:
    return (
        {"role": "tool", "content": text}
        | ({"tool_call_id": call_id} if call_id else {})
        | ({"name": name} if name else {})
    )


def counted(tally: ToolStats, name: str) -> list[float]:
    return [tally.metrics[f"tool/{name}/{what}"] for what in ("calls", "errors", "timeouts")]


def test_answers_are_told_apart_by_id_and_each_counts_once() -> None:
    tally = ToolStats()
    tally.count_calls([("search", "a"), ("search", "b"), ("read", "c"), ("nothing", "d")], ["search", "read"])
    said = [
        tool("Error: search gave no answer within 3 s", "b"),
        tool("no Error", "a"),
        {"role": "user", "content": "Error"},
    ]
    tally.count_results(said)
    tally.count_results([*said, tool("Error: no such page", "c"), tool("Error: what?", "d")])  # a history again
    assert (counted(tally, "search"), counted(tally, "read")) == ([2, 1, 1], [1, 1, 0])
    assert not [name for name in tally.metrics if "nothing" in name]


def test_answers_without_ids_go_to_the_calls_in_order() -> None:
    tally = ToolStats()
    tally.count_calls([("search", "a"), ("read", "b"), ("search", "c")], ["search", "read"])
    tally.count_results([tool("Error: TimeoutError: late", name="read"), tool("fine"), tool("Error: 404")])
    assert (counted(tally, "search"), counted(tally, "read")) == ([2, 1, 0], [1, 1, 1])
    tally.count_results([tool("Error: whose?")])
    assert counted(tally, "search") == [2, 1, 0]


def test_a_tool_that_failed_never_has_its_rates_too() -> None:
    tally = ToolStats()
    tally.count_calls([("search", "a")], ["search"])
    assert counted(tally, "search") == [1, 0, 0]
    assert summed_metrics([tally.metrics, tally.metrics, {"x": 1.0}]) == {
        "tool/search/calls": 2.0, "tool/search/errors": 0.0, "tool/search/timeouts": 0.0, "x": 1.0,
    }  # fmt: skip
