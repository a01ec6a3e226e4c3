"""What a hostile program tries in the sandbox, and what the host sees of it.

The programs are in `rollout.testing.escapes`. The host's side (its files, processes, sockets) is looked at besides.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollout.testing.escapes import ESCAPES
from rollout.testing.processes import descendants
from rollout.tools.sandbox.sandbox import Limits, Program, Sandbox, SandboxRefusedError

LIMITS = Limits(
    wall_seconds=20, cpu_seconds=1, memory_bytes=192 << 20, output_bytes=20_000, file_bytes=4 << 20, files=32
)


@cache
def sandbox(backend: str) -> Sandbox:
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    os.environ["SECRET"] = "the host's"
    made = Sandbox(LIMITS, backend=backend)
    made.start()
    return made


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap"])
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param
    sandbox(request.param).close()
    sandbox.cache_clear()


@pytest.fixture(scope="module")
def victim() -> Iterator[int]:
    """A process of the host whose id is none of a run's own room (where a run is 2)."""
    with contextlib.ExitStack() as stack:
        while True:
            sleeper = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
            stack.callback(sleeper.wait)
            assert sleeper.stdin is not None
            stack.enter_context(sleeper.stdin)
            if sleeper.pid > 10:
                break
        yield sleeper.pid
        assert sleeper.poll() is None  # it still lives


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, victim: int) -> Iterator[dict[str, Any]]:
    """What the programs go for."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "secret").write_text("SECRET")
    folder.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as unix:
        name = f"tessera-{os.getpid()}"
        unix.bind(f"\0{name}")
        unix.listen()
        for listener in (tcp, unix):
            listener.setblocking(False)
        places = {"secret": str(folder / "secret"), "outside": str(folder / "written")}
        yield {"port": tcp.getsockname()[1], "abstract": name, "pid": victim, **places}
        for listener in (tcp, unix):
            with pytest.raises(BlockingIOError):  # nobody has called
                listener.accept()


def test_there_are_escapes_enough() -> None:
    assert len(ESCAPES) >= 30


@pytest.mark.parametrize("name", ESCAPES)
def test_no_escape(backend: str, host: dict[str, Any], name: str) -> None:
    code, told = ESCAPES[name]
    for key, value in host.items():
        code = code.replace("{" + key + "}", str(value)).replace("{" + key + "!r}", repr(value))
    ran = sandbox(backend).run(code)
    assert not re.search("^ESCAPED", ran.output, re.MULTILINE), ran
    assert not ran.ok or name == "above the root" or "execv" in code
    assert re.search(told, ran.output, re.MULTILINE), ran
    assert not Path(host["outside"]).exists()
    assert os.environ["SECRET"] == "the host's"


@pytest.mark.parametrize("kept", ["", "os.unlink(str(i))"])
def test_where_bubblewrap_may_not_bound_files_they_are_counted(monkeypatch: pytest.MonkeyPatch, kept: str) -> None:
    """As where it is setuid. Open files without a name count too."""
    if shutil.which("bwrap") is None:
        pytest.skip("needs bubblewrap")
    monkeypatch.setattr("rollout.tools.sandbox.backends.BOUNDING", ("--cap-drop", "ALL"))
    made = Sandbox(replace(LIMITS, cpu_seconds=10, descriptors=200), backend="bubblewrap")
    code = f"import os, time\nx = []\nfor i in range(150): x.append(open(str(i), 'w')); {kept}\n"
    ran = made.run(code + "time.sleep(15)\nprint('ESCAPED')")
    assert (ran.output, ran.status, ran.reason) == ("", None, "files")
    assert made.run("for i in range(20): open(str(i), 'w').close()\nprint('well')").output == "well\n"
    made.close()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        ("while True: pass", "CPU time"),
        ("import signal\nfor s in (24, 15, 2): signal.signal(s, signal.SIG_IGN)\nwhile True: pass", "CPU time"),
        ("import threading as t\ndef f():\n while True: pass\nfor i in (1, 2): t.Thread(target=f).start()", "CPU time"),
    ],
)
def test_what_does_not_end_is_ended(backend: str, code: str, reason: str) -> None:
    ran = sandbox(backend).run(code)
    assert (ran.status, ran.reason) == (None, reason)
    assert len(ran.output) <= LIMITS.output_bytes


def test_what_sleeps_is_ended(backend: str) -> None:
    sleeper = Sandbox(Limits(wall_seconds=0.3), backend=backend)
    sandbox(backend)
    stubborn = "import signal, time\nfor s in (1, 2, 15): signal.signal(s, signal.SIG_IGN)\n"
    ran = sleeper.run(stubborn + "print('here', flush=True)\ntime.sleep(1000)")
    assert (ran.status, ran.reason, ran.output) == (None, "wall time", "here\n")
    sleeper.close()


def test_a_result_too_large_is_ended(backend: str) -> None:
    assert sandbox(backend).run("", expressions=["'x' * 10_000_000"]).reason == "output"


def server_of(made: Sandbox) -> Any:
    """The process that its runs are children of."""
    server: Any = made._server
    return server._process


def test_nothing_is_left_behind() -> None:
    """Threads that go on, children that can't be: after the run the server has as many processes as before."""
    made = Sandbox(LIMITS, backend="namespaces")
    made.start()
    before = descendants(server_of(made).pid)
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    for ran in made.run_all([Program(code)] * 8):
        assert ran.ok
    until = time.monotonic() + 60
    while descendants(server_of(made).pid) != before and time.monotonic() < until:
        time.sleep(0.01)
    assert descendants(server_of(made).pid) == before
    server = server_of(made).pid
    made.close()
    assert descendants(server) == set()
    assert not Path(f"/proc/{server}").exists()


def test_a_run_that_is_let_go_ends() -> None:
    """It has printed too much, nobody listens any more, and it sleeps on: its warden ends it long before its time."""
    made = Sandbox(Limits(wall_seconds=10_000, output_bytes=1000), backend="namespaces")
    made.start()
    before = descendants(server_of(made).pid)
    ran = made.run(
        "try:\n    while True: print('x' * 1000)\nexcept BaseException: pass\nimport time\ntime.sleep(10_000)"
    )
    assert ran.reason == "output"
    until = time.monotonic() + 60
    while descendants(server_of(made).pid) != before and time.monotonic() < until:
        time.sleep(0.01)
    assert descendants(server_of(made).pid) == before
    made.close()


def test_runs_see_nothing_of_each_other(backend: str) -> None:
    """Neither after one another nor at once."""
    made = sandbox(backend)
    made.run("open('left', 'w').write('x')\nimport builtins\nbuiltins.left = 1")
    assert made.run("import os, builtins\nprint(os.listdir('.'), hasattr(builtins, 'left'))").output == "[] False\n"
    code = "import os, time\nopen({0!r}, 'w').close()\ntime.sleep(0.3)\nprint(os.listdir('.'), os.getpid())"
    outputs = [ran.output for ran in made.run_all([Program(code.replace("{0!r}", repr(n))) for n in "abc"])]
    assert outputs == [f"['{n}'] 2\n" for n in "abc"]


def test_runs_are_nobody_on_the_host_too() -> None:
    """Where the one who starts it may say so: as root, the files of the host's root are not the run's own."""
    code = "import os\nprint(os.getresuid(), os.getresgid(), os.getgroups())"
    assert sandbox("namespaces").run(code).output.startswith("(65534, 65534, 65534) (65534, 65534, 65534)")


def test_without_bubblewrap_it_is_not_run_with_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxRefusedError, match="bwrap is not installed"):
        Sandbox(backend="bubblewrap").start()
