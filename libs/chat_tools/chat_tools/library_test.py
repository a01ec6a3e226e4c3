"""The library as others meet it: its facade, and what importing it costs."""

import subprocess
import sys

import chat_tools


def test_every_public_name_is_there() -> None:
    for name in chat_tools.__all__:
        assert getattr(chat_tools, name) is not None


def imported(program: str) -> set[str]:
    """Return the top-level modules that a program imports in a fresh interpreter."""
    shown = "import sys; before = set(sys.modules)\n" + program + "\nprint(*set(sys.modules) - before)"
    out = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout
    return {name.split(".")[0] for name in out.split()}


def test_the_facade_imports_next_to_nothing() -> None:
    assert imported("import chat_tools") <= {*imported("import typing, importlib"), "chat_tools"}


def test_parsing_and_rendering_import_a_part_of_the_standard_library_alone() -> None:
    """No process pools, no network, no logging, no third-party package; jinja2 comes with the first template."""
    call = """'<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'"""
    names = "StreamParser, ToolCall, detect_format, extend, parse, render"
    ours = imported(f"from chat_tools import {names}\nparse({call}, 'hermes')")
    assert ours - imported("import __future__, typing, dataclasses, json, bisect, heapq, weakref") == {"chat_tools"}
