"""What a run says of a schedule of the user's that does not hold its sampler to the trainer."""

from apps.common.sampler_certificate import unchecked
from schedules.sampling.first_batch import SamplerCheck
from schedules.schedule import TrainStepResult
from schedules.weights.sampler_bound import SamplerBound


def test_a_schedule_without_the_check_is_told() -> None:
    metrics = {"train/computed_sequences": 4.0}
    line = unchecked("plain.py:Plain", TrainStepResult([], [], metrics))
    assert line is not None
    assert line.startswith("schedule plain.py:Plain did not check the sampler")


def test_others_are_not() -> None:
    none = TrainStepResult([], [], {"train/computed_sequences": 0.0})
    check = SamplerCheck(0, 0.0, SamplerBound(1e-3, "float32"), (4,))
    assert unchecked("plain.py:Plain", none) is None, "no token was computed"
    assert unchecked("plain.py:Plain", TrainStepResult([], [], {}, sampler=check)) is None
    assert unchecked("sync", TrainStepResult([], [], {})) is None
