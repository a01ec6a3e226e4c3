import math

import pytest

from apps.common.divergence import DivergenceError, check_loss


@pytest.mark.parametrize(("nats", "ends"), [(0.0, False), (13.8, False), (14.0, False), (70.0, True), (math.nan, True)])
def test_a_loss_far_above_guessing_ends_the_run(nats, ends):
    if not ends:
        check_loss(3, nats, 1000)
        return
    with pytest.raises(DivergenceError, match=r"Lower --engine\.lr"):
        check_loss(3, nats, 1000)
