"""Plain data as bytes: what comes back is what was sent, to the bit and by type, and nothing that was not expected."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.comm.plain import dataclasses_in, decode_plain, encode_plain


@dataclass(frozen=True)
class Order:
    step: int
    parts: tuple[Any, ...] = ()
    made: int = field(default=0, init=False)


class Pair(NamedTuple):
    first: Any
    second: Any


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.builds(Path, st.sampled_from(["/a/b", "c"]))
)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text())
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.sets(st.integers(), max_size=3)
        | st.frozensets(st.text(), max_size=3)
        | st.builds(Order, st.integers(), st.lists(inner, max_size=2).map(tuple))
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(values)
def test_what_comes_back_is_what_was_sent(value: Any) -> None:
    found = decode_plain(encode_plain(value), (Order, Pair))
    assert found == value
    assert repr(found) == repr(value) or isinstance(value, set | frozenset | dict | list | tuple | Order)
    assert type(found) is type(value)


def test_numbers_that_json_lacks_come_back() -> None:
    found = decode_plain(encode_plain([math.nan, math.inf, -math.inf, -0.0, 5e-324]))
    assert math.isnan(found[0])
    assert found[1:3] == [math.inf, -math.inf]
    assert (math.copysign(1, found[3]), found[4]) == (-1, 5e-324)


def test_a_dataclass_that_is_not_expected_is_refused() -> None:
    with pytest.raises(ValueError, match="a Order was sent, and Pair is expected"):
        decode_plain(encode_plain(Order(1)), (Pair,))


def test_the_dataclasses_of_a_value_are_those_that_another_like_it_needs() -> None:
    value = {"a": (Order(1, (Order(2), Pair(1, [Order(3)]))), {Path("b")})}
    assert dataclasses_in(value) == (Order,)
    assert decode_plain(encode_plain(Order(4)), dataclasses_in(value)) == Order(4)
    assert dataclasses_in([1, "a", None]) == ()


def test_what_arrives_can_name_no_code() -> None:
    """What a pickle would call: the name of a class that the receiver has not named."""
    with pytest.raises(ValueError, match=r"a os\.system was sent, and no dataclass is expected"):
        decode_plain(json.dumps({"os.system": {"command": "true"}}).encode())


def test_what_is_no_plain_value_is_refused() -> None:
    with pytest.raises(ValueError, match="a object is no plain value"):
        encode_plain({"a": [object()]})
