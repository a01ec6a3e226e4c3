import json
from dataclasses import asdict

import pytest

from rollout import Sampling, StructuredOutputs
from schedules.sampling.sampler_process import read_sampling


@pytest.mark.parametrize(
    "wanted", [StructuredOutputs(), StructuredOutputs(choice=("a", "b")), StructuredOutputs(regex="a+")]
)
def test_settings_are_the_same_beyond_the_pipe(wanted: StructuredOutputs) -> None:
    sampling = Sampling(max_new_tokens=7, structured_outputs=wanted)
    read = read_sampling(json.loads(json.dumps(asdict(sampling))))
    assert read.structured_outputs == wanted
    assert bool(read.structured_outputs) == bool(wanted)
    assert read.max_new_tokens == 7
