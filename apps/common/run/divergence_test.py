import math

import pytest

from apps.common.run.divergence import DivergenceError, check_loss, name_sampler_errors
from rollout import NotFiniteError


@pytest.mark.parametrize(("nats", "ends"), [(0.0, False), (13.8, False), (14.0, False), (70.0, True), (math.nan, True)])
def test_a_loss_far_above_guessing_ends_the_run(nats: float, ends: bool) -> None:
    if not ends:
        check_loss(3, nats, 1000)
        return
    with pytest.raises(DivergenceError, match=r"Lower --learning-rate"):
        check_loss(3, nats, 1000)


def test_what_the_sampler_tells_of_the_policy_is_a_divergence_and_nothing_else_is() -> None:
    for error, kind in ((NotFiniteError("NaN"), DivergenceError), (ValueError("weights are not finite"), ValueError)):
        with pytest.raises(kind, match=str(error)) as caught, name_sampler_errors(3):
            raise error
        assert caught.type is kind
