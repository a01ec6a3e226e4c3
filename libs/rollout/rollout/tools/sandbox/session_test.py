"""Sessions under attack: what programs that may start processes try, and what stays within limits.

The host's side (its processes, its files) is looked at besides.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollout.testing.escapes import ESCAPES
from rollout.testing.processes import descendants
from rollout.tools.sandbox.backends import Podman
from rollout.tools.sandbox.client_run import Limits, Ran
from rollout.tools.sandbox.errors import SandboxDiedError, SandboxRefusedError
from rollout.tools.sandbox.session import NamespaceSession, SessionSandbox, _Printed

LIMITS = Limits(
    wall_seconds=20, cpu_seconds=2, memory_bytes=256 << 20, output_bytes=4000, file_bytes=8 << 20, files=64, tasks=32
)
ALLOWED = {
    "above the root",  # it looks for /etc, where there is /etc/alternatives
    "higher limits",  # of the processor's time, which the supervisor counts
    "open descriptors",  # its cells besides its result
    "programs of the host", "subprocess",
}  # fmt: skip
"""Escapes from a run that a session allows."""


def skip_without_podman() -> None:
    try:
        made = SessionSandbox(backend="podman")
        made.start()
        made.close()
    except SandboxRefusedError as error:
        pytest.skip(f"podman can't run a container here: {error}")


@pytest.fixture(scope="module", params=["namespaces", "podman"])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "podman":
        skip_without_podman()
    return name


@pytest.fixture(scope="module")
def sandbox(backend: str) -> Iterator[SessionSandbox]:
    made = SessionSandbox(LIMITS, backend=backend)
    yield made
    made.close()


@pytest.fixture
def session(sandbox: SessionSandbox) -> Iterator[NamespaceSession]:
    made = sandbox.open()
    yield made
    made.close()


def server_pid(sandbox: SessionSandbox) -> int:
    server = sandbox.start()
    if not isinstance(server, Podman):
        return server._process.pid
    command = ["podman", "inspect", "--format", "{{.State.Pid}}", os.path.basename(server._files.name)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def settled(sandbox: SessionSandbox, expected: set[int]) -> bool:
    """Wait until the server has no processes but these, some of which may have ended."""
    until = time.monotonic() + 60
    while not descendants(server_pid(sandbox)) <= expected and time.monotonic() < until:
        time.sleep(0.01)
    return descendants(server_pid(sandbox)) <= expected


def test_files_stay_and_limits_begin_anew(session: NamespaceSession) -> None:
    """Each cell has the processor's time to itself."""
    for number in range(3):
        burn = "import time\nend = time.process_time() + 1\nwhile time.process_time() < end: pass"
        ran = session.python(burn)
        assert (ran.status, ran.reason) == (None, None)
        assert session.shell(f"echo {number} >> log; cat log").output == "".join(f"{n}\n" for n in range(number + 1))
    assert session.python("open('log').read()").output == "'0\\n1\\n2\\n'\n"


def test_state_of_a_shell(session: NamespaceSession) -> None:
    session.shell("mkdir -p 'a b'; cd 'a b'; export X=$'one\\ntwo'; Y=3; f() { :; }")
    assert session.shell('pwd; echo "$X"; echo "[$Y]"').output == f"{work(session)}/a b\none\ntwo\n[]\n"
    assert "syntax error" in session.shell("if then").output
    session.shell("cd ..; rmdir 'a b'; exec true")  # keeps the folder, which is gone now
    assert session.shell("echo still here").output.endswith("still here\n")
    assert session.shell("echo \0").status == 2


def work(session: NamespaceSession) -> str:
    return session.shell("echo ~").output.strip()


def test_variables_of_a_python(session: NamespaceSession) -> None:
    session.python("import math\ndef f(x):\n    return math.pi * x")
    ran = session.python("f(2)")
    assert (ran.output, ran.status, ran.reason) == ("6.283185307179586\n", None, None)
    assert 'File "cell-3.py", line 2' in session.python("x = 1\nf('a' / 2)").output
    assert session.python("import sys; sys.exit(3)").status is None
    assert session.python("x").output == "1\n"


@pytest.mark.parametrize(
    "end", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)", "import ctypes; ctypes.string_at(1)"]
)
def test_a_python_that_ends_begins_anew(session: NamespaceSession, end: str) -> None:
    session.python("x = 1\nopen('f', 'w').write('kept')")
    assert session.python(end).status in (3, -9, -11)
    assert "NameError" in session.python("x").output
    assert session.python("open('f').read()").output == "'kept'\n"


@pytest.fixture(scope="module")
def brief(backend: str) -> Iterator[NamespaceSession]:
    """A session whose limit on wall time is met before that on the processor's by what does not compute."""
    made = SessionSandbox(Limits(wall_seconds=6, cpu_seconds=1, output_bytes=4000), backend=backend)
    session = made.open()
    yield session
    session.close()
    made.close()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("sleep 1000", "wall time"),
        ("trap '' TERM INT HUP; while :; do sleep 1; done", "wall time"),
        ("for i in 1 2 3; do (while :; do :; done) & done; wait", "CPU time"),
        ("setsid bash -c 'while :; do :; done' & sleep 100", "CPU time"),
        ("yes", "output"),
    ],
)
def test_what_does_not_end_is_ended(brief: NamespaceSession, command: str, reason: str) -> None:
    ran = brief.shell(command)
    assert (ran.status, ran.reason) in ((None, reason), (None, "wall time"))
    assert ran.reason == reason or ran.wall_seconds > 6  # on a busy machine
    assert len(ran.output) < 4100
    assert brief.shell("echo well").output == "well\n"


@pytest.mark.parametrize("cell", ["while True: print('x' * 1000)", "while True: pass", "import time; time.sleep(1000)"])
def test_what_does_not_end_in_a_cell(brief: NamespaceSession, cell: str) -> None:
    assert brief.python(cell).reason is not None
    assert brief.python("1 + 1").output == "2\n"


@pytest.mark.parametrize(
    "command",
    [
        "for i in 1 2 3 4 5 6; do python3 -c 'import time; x = b\"x\" * (60 << 20); time.sleep(30)' & done; wait",
        "python3 -c 'x = b\"x\" * (300 << 20)'",
    ],
)
def test_memory_is_that_of_all_processes(session: NamespaceSession, command: str) -> None:
    ran = session.shell(command)
    assert ran.reason == "memory" or "MemoryError" in ran.output or "cannot allocate" in ran.output, ran
    assert session.shell("echo well").output == "well\n"


def test_a_fork_bomb_is_bounded(sandbox: SessionSandbox, session: NamespaceSession) -> None:
    session.shell("true")
    before = descendants(server_pid(sandbox))
    ran = session.shell("bomb() { bomb | bomb & }; bomb; sleep 1; echo over")
    assert "Resource temporarily unavailable" in ran.output
    assert settled(sandbox, before)
    ran = session.python("import os\npids = []\nwhile True: pids.append(os.fork() or os._exit(0) or 0)")
    assert "BlockingIOError" in ran.output or ran.reason is not None
    assert session.shell("echo well").output == "well\n"


def test_there_are_no_sessions_where_the_kernel_bounds_no_processes() -> None:
    """As in a namespace that maps the machine's root alone."""
    code = "from rollout.tools.sandbox.session import SessionSandbox; SessionSandbox().start()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = ["unshare", "-U", "-r", sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert "SandboxRefusedError: programs that start others need a bound of their number" in done.stderr


def test_nothing_runs_on_in_the_background(sandbox: SessionSandbox, session: NamespaceSession) -> None:
    session.shell("true")
    before = descendants(server_pid(sandbox))
    assert session.shell("(setsid sleep 1000 > /dev/null 2>&1 &) ; nohup sleep 1000 & echo left").output == "left\n"
    assert settled(sandbox, before)
    thread = "import threading\nn = 0\ndef count():\n    global n\n    while True: n += 1\n"
    session.python(thread + "threading.Thread(target=count, daemon=True).start()")
    child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass'])"
    session.python(child)
    pids = descendants(server_pid(sandbox)) - before
    first = [ticks(pid) for pid in pids]
    time.sleep(0.5)
    assert [ticks(pid) for pid in pids] == first
    session.close()
    until = time.monotonic() + 60
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.01)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def ticks(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]


def test_episodes_do_not_see_each_other(sandbox: SessionSandbox) -> None:
    one, other = sandbox.open(), sandbox.open()
    one.shell("echo hidden > file; chmod 644 file")
    one.python("import time; x = 'hidden'")
    seen = other.shell("cat ~/file; find / -name file -path '*tmp*' 2>/dev/null; ls -A ~")
    assert seen.output == f"cat: {work(other)}/file: No such file or directory\n"
    assert "No such file" in other.shell("ls /proc").output
    assert other.shell("for p in $(seq 3 200); do kill -9 $p 2>/dev/null; done; kill -9 -1").reason is None
    assert one.python("x").output == "'hidden'\n"
    one.close()
    other.close()


def test_files_are_bounded(session: NamespaceSession) -> None:
    assert "File too large" in session.shell("head -c 20M /dev/urandom > big").output
    assert "No space left" in session.shell("head -c 4M /dev/urandom > big2").output
    session.shell("rm -f big*")
    assert "No space left" in session.shell("for i in $(seq 100); do : > f$i; done").output
    assert session.shell("rm -f f*; echo well > g; cat g").output == "well\n"


def test_there_is_no_network(session: NamespaceSession) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        ran = session.shell(f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo ESCAPED")
        assert "ESCAPED" not in ran.output
        ran = session.python(f"import socket; socket.create_connection(('127.0.0.1', {port})); print('ESCAPED')")
        assert "PermissionError" in ran.output
        with pytest.raises(BlockingIOError):
            server.accept()


@pytest.mark.parametrize(
    "name", [name for name, (code, _) in ESCAPES.items() if "{" not in code and "fork" not in code]
)
def test_no_escape_of_runs_is_one_here(session: NamespaceSession, name: str) -> None:
    """The programs that try it in a run; here they may start processes, and see the programs of the host."""
    ran = session.python(ESCAPES[name][0])
    assert ("ESCAPED" in ran.output.splitlines()) == (name in ALLOWED), (name, ran.output)


def test_memory_that_processes_share_has_to_be_a_files(session: NamespaceSession) -> None:
    shared = "import mmap\nmmap.mmap(-1, 1 << 20)"
    assert "PermissionError" in session.python(shared).output
    assert (
        session.python("mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\nprint('private')").output
        == "private\n"
    )
    assert session.shell("ls /dev/zero").status == 2


def test_a_forged_report_harms_its_own_session_alone(session: NamespaceSession) -> None:
    session.python("import os\nos.write(3, b'\\n' * 5)\nx = 1")
    session.python("import os\nos.closerange(3, 100)")
    assert session.shell("echo well").output == "well\n"
    assert session.shell("echo 'echo forged' >&3; exec 3>&-").status == 0
    assert session.shell("echo well").output.endswith("well\n")


def lost(run: Callable[[str], Ran]) -> None:
    """Run commands until the sandbox has died, which takes the kernel a moment."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        run("true")


def test_a_server_that_is_lost_is_started_anew() -> None:
    sandbox = SessionSandbox(LIMITS)
    session = sandbox.open()
    os.kill(server_pid(sandbox), 9)
    with pytest.raises(SandboxDiedError):
        lost(session.shell)
    with pytest.raises(SandboxDiedError):
        lost(lambda command: sandbox.open().shell(command))
    assert sandbox.open().shell("echo well").output == "well\n"
    sandbox.close()


def test_where_there_is_no_bash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: path != "/bin/bash")
    with pytest.raises(SandboxRefusedError, match="/bin/bash"):
        SessionSandbox(LIMITS).start()


def test_head_and_tail() -> None:
    for sizes in ([10], [3, 3, 3], [1] * 50, [100]):
        printed, text = _Printed(8), b""
        for number, size in enumerate(sizes):
            chunk = bytes([65 + number % 26]) * size
            printed.add(chunk)
            text += chunk
        if len(text) <= 8:
            assert printed.text() == text.decode()
        else:
            assert printed.text() == f"{text[:4].decode()}\n[{len(text) - 8} bytes cut]\n{text[-4:].decode()}"
