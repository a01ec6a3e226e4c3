import itertools
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.parallel.stages import split_layers, stage_layers

COUNT = st.one_of(st.none(), st.integers(1, 30))


def split_or_fix(*args: Any, **kwargs: Any) -> Any:
    """The split, or the text of the refusal."""
    try:
        return split_layers(*args, **kwargs)
    except ValueError as error:
        return str(error)


@given(st.integers(1, 100), st.integers(1, 16), st.integers(1, 4), COUNT, COUNT)
def test_a_split_sums_to_all_layers_or_is_refused_with_a_fix(
    layers: int, stages: int, chunks: int, first: int | None, last: int | None
) -> None:
    split = split_or_fix(layers, stages, chunks, first, last)
    if isinstance(split, str):
        assert re.search("change first_stage_layers|set first_stage_layers|lower virtual_pipeline_parallel", split)
        return
    assert len(split) == stages
    assert sum(sum(stage) for stage in split) == layers
    assert all(len(stage) == chunks and len(set(stage)) == 1 and stage[0] >= 1 for stage in split)
    if stages > 1:
        assert first is None or sum(split[0]) == first
        assert last is None or sum(split[-1]) == last
    assert len({sum(stage) for stage in split[1:-1]}) <= 1
    order = [stage_layers(split, stage, chunk) for chunk in range(chunks) for stage in range(stages)]
    assert list(itertools.chain(*order)) == list(range(layers))
    assert [[len(stage_layers(split, stage, chunk)) for chunk in range(chunks)] for stage in range(stages)] == [
        list(stage) for stage in split
    ]


@given(st.integers(1, 100), st.integers(1, 16))
def test_the_uneven_split_that_is_proposed_works(layers: int, stages: int) -> None:
    split = split_or_fix(layers, stages)
    if isinstance(split, str):
        proposed = re.search(r"such as (\d+) and (\d+)", split)
        if proposed:
            split_layers(layers, stages, first=int(proposed[1]), last=int(proposed[2]))
        else:
            assert layers < stages


def test_the_split_of_94_layers_over_eight_stages() -> None:
    assert [sum(stage) for stage in split_layers(94, 8, first=11, last=11)] == [11, *[12] * 6, 11]
    with pytest.raises(ValueError, match="such as 11 and 11"):
        split_layers(94, 8)
