import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.common.divergence import DivergenceError, check_loss, check_metrics


@given(st.dictionaries(st.text(), st.floats(allow_nan=False, allow_infinity=False)), st.integers())
def test_finite_metrics_pass(metrics, step):
    check_metrics(step, metrics)


@given(st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_no_number_ends_the_run_by_name(value):
    with pytest.raises(DivergenceError, match=r"step 7: grad_norm .*--engine\.lr"):
        check_metrics(7, {"loss": 1.0, "grad_norm": value})


@pytest.mark.parametrize(("nats", "ends"), [(0.0, False), (13.8, False), (14.0, False), (70.0, True), (math.nan, True)])
def test_a_loss_far_above_guessing_ends_the_run(nats, ends):
    if not ends:
        check_loss(3, nats, 1000)
        return
    with pytest.raises(DivergenceError, match=r"lower --engine\.lr"):
        check_loss(3, nats, 1000)
