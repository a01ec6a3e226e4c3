"""Tools of a session by their names on a command line."""

import pytest

from apps.common.plugins import load_tools
from rollout.tools.tool import EpisodeTool


def test_tools_of_a_session_share_its_settings() -> None:
    shell, python = load_tools(["shell", "python"], ["seconds=5", "memory_mib=256"])
    assert (shell.name, python.name) == ("shell", "python")
    assert isinstance(shell, EpisodeTool)
    assert isinstance(python, EpisodeTool)
    assert shell.opens == python.opens
    assert shell.timeout == 65
    with pytest.raises(ValueError, match="minutes"):
        load_tools(["shell"], ["minutes=5"])
