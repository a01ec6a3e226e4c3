"""The test wrapper: what a test sees of the machine, and what it does not."""

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest


def test_interpreter_is_the_registered_one() -> None:
    """A Python of the locks, from an empty virtual environment: no package of the machine's own is in sight."""
    assert (3, 11) <= sys.version_info[:2] <= (3, 13)
    assert sys.prefix != sys.base_prefix
    assert not list(Path(sys.prefix).glob("lib/python*/site-packages/*.dist-info"))


def test_home_is_temporary() -> None:
    """Whatever a package caches goes to the test's own folder."""
    assert os.environ["HOME"] == os.environ["TEST_TMPDIR"]


def test_a_socket_fits_below_the_temporary_folder() -> None:
    """Whatever folder Bazel gives a test: the path of a socket has at most 108 bytes."""
    assert Path(tempfile.gettempdir()).resolve() == Path(os.environ["TEST_TMPDIR"]).resolve()
    with socket.socket(socket.AF_UNIX) as listener, tempfile.TemporaryDirectory(prefix="pymp-") as folder:
        listener.bind(os.path.join(folder, "listener-12345678"))


def test_loopback_works_and_nothing_else_does() -> None:
    """Processes of one test may talk over loopback; the sandbox has no other device."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), timeout=5):
        pass
    if Path("/proc/net/dev").exists():
        devices = [line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
        assert devices == ["lo"]


def test_undeclared_package_is_not_importable() -> None:
    """This target declares pytest alone."""
    with pytest.raises(ModuleNotFoundError):
        import ray  # noqa: F401
