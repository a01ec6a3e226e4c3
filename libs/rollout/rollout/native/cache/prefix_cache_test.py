"""Kept streams: the longest prefix is found, memory is bounded, what was not used goes first."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollout.native.cache.prefix_cache import MANY, PrefixCache, stream_of
from rollout.native.decoders.decoder import Past

TOKENS = st.lists(st.sampled_from([0, 1, 2, 255, 256, 70000]), min_size=1, max_size=6)
Group = tuple[list[list[int]], int, int]


def test_many_streams_that_come_and_leave_together_are_in_order() -> None:
    kept = PrefixCache[str](10_000)
    for name in ("a", "b", "c"):  # the third drives out the first
        streams = [stream_of([ord(name), i % 7, i]) for i in range(MANY)]
        kept.add([stream_of([ord(name)])], f"one {name}", 1)
        kept.add(streams, f"many {name}", 4_000)
        assert kept._order == sorted(kept._order)
        assert len(kept) == len(kept._order) == len(set(kept._order))
        found = kept.longest([ord(name), 3, 10, 5])
        assert found == (Past(f"many {name}", 10), 3)
    assert kept.longest([ord("a"), 3, 10, 5]) is None
    assert kept.caches == ["one b", "many b", "one c", "many c"]


@given(st.lists(TOKENS, max_size=12, unique_by=tuple), st.lists(TOKENS, min_size=1, max_size=6))
def test_the_longest_kept_prefix_is_found(streams: list[list[int]], prompts: list[list[int]]) -> None:
    kept: PrefixCache[str] = PrefixCache(1000)
    for i, stream in enumerate(streams):
        kept.add([stream_of(stream)], f"cache {i}", len(stream))
    for prompt in prompts:
        fitting = [s for s in streams if len(s) < len(prompt) and prompt[: len(s)] == s]
        best = max(fitting, key=len, default=None)
        found = kept.longest(prompt)
        if best is None:
            assert found is None
        else:
            assert found == (Past(f"cache {streams.index(best)}", 0), len(best))


class Model:
    """The same by a list, newest use last."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.groups: list[Group] = []

    def use(self, group: Group) -> None:
        self.groups.remove(group)
        self.groups.append(group)

    def add(self, streams: list[list[int]], cache: int, size: int) -> None:
        self.groups.append((streams, cache, size))
        while sum(size for _, _, size in self.groups) > self.most:
            self.groups.pop(0)

    def longest(self, prompt: list[int]) -> tuple[Past[int], int] | None:
        fitting = [(s, g) for g in self.groups for s in g[0] if len(s) < len(prompt) and prompt[: len(s)] == s]
        if not fitting:
            return None
        stream, group = max(fitting, key=lambda f: len(f[0]))
        self.use(group)
        return (Past(group[1], group[0].index(stream)), len(stream))


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.lists(TOKENS, min_size=1, max_size=3, unique_by=tuple)),
            st.tuples(st.just("ask"), TOKENS),
            st.tuples(st.just("known"), TOKENS),
        ),
        max_size=25,
    )
)
def test_what_was_used_least_recently_goes_first(script: list[tuple[str, Any]]) -> None:
    kept, model = PrefixCache[int](20), Model(20)
    for number, (what, value) in enumerate(script):
        if what == "ask":
            assert kept.longest(value) == model.longest(value)
        elif what == "known":
            group = next((g for g in model.groups if value in g[0]), None)
            assert kept.known(stream_of(value)) == (group is not None)
            if group is not None:
                model.use(group)
        else:
            new = [s for s in value if not any(s in streams for streams, _, _ in model.groups)]
            if new:
                size = sum(map(len, new))
                kept.add([stream_of(s) for s in new], number, size)
                model.add(new, number, size)
        assert kept.caches == [group[1] for group in model.groups]
        assert kept.tokens == sum(size for _, _, size in model.groups) <= 20
        assert len(kept) == sum(len(streams) for streams, _, _ in model.groups)
    kept.clear()
    assert (len(kept), kept.tokens, kept.longest([1, 2, 3])) == (0, 0, None)
