"""The launch line of a plan, copied, gives the configuration that was planned, for each flag by itself."""

import pytest

from apps.common.cli.flags import changed
from apps.common.tests.launch_line_test import (
    APPS,
    EXPECTED,
    FLAGS,
    GIVEN,
    assert_copied,
    command_line,
    own_code,  # noqa: F401
    parsed,
)


@pytest.mark.parametrize("app", APPS)
def test_one_flag_at_a_time(app: str) -> None:
    """Each with its first value that the parser takes; in sft those that grpo has not."""
    default, reached = command_line(app).recipes["quickstart"], set[str]()
    for words in FLAGS[app]:
        if words[0] in reached or (app == "sft" and any(words[0] == other[0] for other in FLAGS["grpo"])):
            continue
        config = parsed(app, [*words])
        if config is None or APPS[app][1](config).needs_model:
            config = parsed(app, [*words, *GIVEN])
        if config is not None and changed(config, default):
            assert_copied(app, config)
            reached.add(words[0])
    assert reached > EXPECTED[app]
