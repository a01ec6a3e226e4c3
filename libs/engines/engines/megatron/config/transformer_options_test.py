"""Options of DeepEP that would do nothing are refused."""

from typing import Any

import pytest

from engines.megatron.config.transformer_options import checked_options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"moe_flex_dispatcher_backend": "deepep"}, "needs the package deep_ep, which is not installed"),
        ({"moe_flex_dispatcher_backend": "hybridep"}, "is of another dispatcher"),
        ({"moe_flex_dispatcher_backend": "ncclep"}, "is of another dispatcher"),
        ({"moe_hybridep_num_sms": 8}, "is of another dispatcher"),
        ({"moe_deepep_num_sms": 8}, "has no effect without moe_flex_dispatcher_backend=deepep"),
        ({"moe_enable_deepep": True}, "is set by moe_flex_dispatcher_backend=deepep"),
    ],
)
def test_options_of_deepep_that_do_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checked_options(options)
