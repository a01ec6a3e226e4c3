"""The sandbox as its users see it: what a run gives back, what is refused and when, what a server's death does."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.tools.sandbox import seccomp
from rollout.tools.sandbox.bubblewrap import bubblewrap_command
from rollout.tools.sandbox.run import encoded
from rollout.tools.sandbox.sandbox import Limits, Program, Sandbox, SandboxDiedError

ROOT = str(Path(seccomp.__file__).parents[3])


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    made = Sandbox(Limits(wall_seconds=60, cpu_seconds=30), backend="namespaces")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("code", "output", "status"),
    [
        ("print('a')\n1 + 1", "a\n2\n", 0),
        ("None", "", 0),
        ("", "", 0),
        ("import sys\nsys.stderr.write('e')\nsys.exit(3)", "e", 3),
        ("import sys\nsys.exit('no')", "no\n", 1),
        ("raise SystemExit", "", 0),
        ("import sys\nprint(input(), sys.stdin.read())", "first second\nthird\n", 0),
        ("if __name__ == '__main__': print('main')", "main\n", 0),
        ("import sqlite3, xml.dom\nsqlite3.connect(':memory:').execute('select 2').fetchone()", "(2,)\n", 0),
        ("import asyncio\nprint(asyncio.run(asyncio.sleep(0, 'async')))", "async\n", 0),
        ("import concurrent.futures as c\nwith c.ThreadPoolExecutor(2) as p: p.submit(print, 1)", "1\n", 0),
        ("import threading as t, time\nt.Thread(target=lambda: (time.sleep(0.05), print(1))).start()", "1\n", 0),
        ("import os\nopen('f', 'w').write('x')\nos.getcwd(), os.listdir()", "('/tmp', ['f'])\n", 0),
        ("import sys\nsys.stdout.buffer.write(bytes([255]))", "\ufffd1\n", 0),
        ("import os\nos.kill(os.getpid(), 11)", "", -11),
        ("import os\nprint(*sorted(os.environ))", "HOME LANG MALLOC_ARENA_MAX OMP_NUM_THREADS PATH TMPDIR\n", 0),
    ],
)  # fmt: skip
def test_a_run(sandbox: Sandbox, code: str, output: str, status: int) -> None:
    ran = sandbox.run(code, stdin="first\nsecond\nthird")
    assert (ran.output, ran.status, ran.reason) == (output, status, None)
    assert ran.ok == (status == 0)


def test_an_error_is_told_as_python_tells_it(sandbox: Sandbox) -> None:
    ran = sandbox.run("def f(x):\n    return 1 / x\n\nf(0)")
    assert ran.status == 1
    assert ran.output.splitlines()[:3] == [
        "Traceback (most recent call last):",
        '  File "program.py", line 4, in <module>',
        "    f(0)",
    ]
    assert ran.output.endswith("ZeroDivisionError: division by zero\n")
    assert "run.py" not in ran.output
    assert "SyntaxError" in sandbox.run("1 +").output
    assert "RecursionError" in sandbox.run("def f(): f()\nf()").output


KEYS = st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
VALUES = st.recursive(
    st.none() | st.booleans() | KEYS | st.floats(allow_nan=False, allow_infinity=False),
    lambda v: (
        st.lists(v, max_size=3) | st.tuples(v, v) | st.dictionaries(KEYS, v, max_size=3) | st.sets(KEYS, max_size=2)
    ),
    max_leaves=6,
)


@settings(max_examples=25, deadline=None)
@given(st.lists(VALUES, max_size=3))
def test_values_of_expressions_come_back_as_they_are(sandbox: Sandbox, values: list[Any]) -> None:
    ran = sandbox.run("", expressions=[repr(value) for value in values])
    assert ran.results == tuple(encoded(value) for value in values)
    assert ran.ok


def test_what_an_object_says_of_itself_is_no_value(sandbox: Sandbox) -> None:
    code = (
        "class Any:\n    def __eq__(self, other): return True\n    def __repr__(self): return '4'\n    __hash__ = None"
    )
    assert sandbox.run(code, expressions=["Any()", "{1: (2, {3})}"]).results == (
        {"object": "Any"},
        {"dict": [[1, [2, {"set": [3]}]]]},
    )


def test_standard_error_can_be_left_out(sandbox: Sandbox) -> None:
    program = Program("import sys\nsys.stderr.write('e')\nprint('o')\n1 / 0", errors=False)
    assert sandbox.run_all([program])[0].output == "o\n"


def test_runs_go_side_by_side_in_the_order_given(sandbox: Sandbox) -> None:
    """Ten that sleep half a second end although all of them have but sixty: the order is that of the programs."""
    programs = [Program(f"import time\ntime.sleep({(9 - i) / 20})\nprint({i})") for i in range(10)]
    assert [ran.output for ran in sandbox.run_all(programs)] == [f"{i}\n" for i in range(10)]
    assert sandbox.run_all([]) == []


def test_one_sandbox_serves_many_threads(sandbox: Sandbox) -> None:
    outputs: dict[int, list[str]] = {}

    def work(n: int) -> None:
        outputs[n] = [sandbox.run(f"print({n})").output for _ in range(3)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outputs == {n: [f"{n}\n"] * 3 for n in range(8)}


def test_a_server_that_died_is_said_and_replaced() -> None:
    made = Sandbox()
    assert made.run("1").ok
    server: Any = made._server
    os.killpg(server._process.pid, signal.SIGKILL)
    server._process.wait()
    with pytest.raises(SandboxDiedError):
        made.run("1")
    assert made.run("2").output == "2\n"
    made.close()


def test_packages_can_be_shown(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can't be read by nobody"):
        Sandbox(packages=[str(tmp_path)])
    tmp_path.chmod(0o755)
    (tmp_path / "shown.py").write_text("value = 'shown'")
    made = Sandbox(packages=[str(tmp_path)])
    assert made.run("import shown\nprint(shown.value)").output == "shown\n"
    assert "Read-only" in made.run(f"open({str(tmp_path / 'shown.py')!r}, 'w')").output
    made.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backend": "docker"}, "backend must be"),
        ({"max_runs": 0}, "max_runs must be"),
        ({"packages": ["nowhere"]}, "nowhere is no folder"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sandbox(**change)
    with pytest.raises(ValueError, match="the limit wall_seconds must be more than 0"):
        Limits(wall_seconds=0)
    with pytest.raises(ValueError, match="memory_bytes must be at least"):
        Limits(memory_bytes=1 << 20)


REFUSING = """
import os, sys
sys.path.append({root!r})
from rollout.tools.sandbox import kernel, namespaces
from rollout.tools.sandbox.sandbox import Sandbox, SandboxRefusedError
left, mapped = os.pipe(), os.pipe()
child = os.fork()
if child:
    os.read(left[0], 1)
    user = os.geteuid()
    group = os.getegid()
    maps = {{"setgroups": "deny", "uid_map": f"{{user}} {{user}} 1", "gid_map": f"{{group}} {{group}} 1"}}
    for name, text in maps.items():
        namespaces._write(child, name, text)
    os.write(mapped[1], b".")
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
kernel.unshare(kernel.CLONE_NEWUSER)
os.write(left[1], b".")
os.read(mapped[0], 1)
{prepare}
try:
    program = "import os\\nprint(os.getresuid())\\nfor f in ('/x', '/dev/x', os.__file__):\\n    try: open(f, 'w')\\n"
    print(Sandbox(backend="namespaces").run(program + "    except OSError as error: print(error.strerror)").output)
except SandboxRefusedError as error:
    print("REFUSED", error)
sys.stdout.flush()
os._exit(0)
"""


def elsewhere(prepare: str) -> str:
    """Use a sandbox from within a user namespace that maps one user alone."""
    code = REFUSING.format(root=ROOT, prepare=prepare)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_where_the_kernel_refuses_the_sandbox_refuses() -> None:
    """No user namespace may be made any more: nothing is run with less."""
    said = elsewhere("open('/proc/sys/user/max_user_namespaces', 'w').write('0')")
    assert said.startswith("REFUSED Python from a model is not run here")
    assert "user namespaces: " in said
    assert "No space left on device" in said


def test_who_may_map_no_other_user_is_nobody_inside() -> None:
    """And nothing is writable, although it owns it all there."""
    assert elsewhere("") == "(65534, 65534, 65534)\n" + "Read-only file system\n" * 3 + "\n"


def test_the_filter_refuses_each_of_its_calls_and_no_jump_leaves_it() -> None:
    """Run the filter on every number as the kernel would: the outcome by its list."""
    program = seccomp.program()
    code = [program[i : i + 8] for i in range(0, len(program), 8)]

    def outcome(number: int, argument: int = 0, architecture: int = 0xC000003E) -> int:
        data = {0: number, 4: architecture, 16: argument}
        at, value = 0, 0
        while True:
            operation, yes, no, operand = (
                int.from_bytes(code[at][:2], "little"),
                code[at][2],
                code[at][3],
                int.from_bytes(code[at][4:], "little"),
            )
            at += 1
            if operation == 0x06:
                return operand
            if operation == 0x20:
                value = data[operand]
            else:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[operation]
                at += yes if holds else no

    allowed, refused, again, unknown, killed = 0x7FFF0000, 0x50001, 0x5000B, 0x50026, 0x80000000
    for number in range(500):
        if number in (56, 53):
            continue
        expected = (
            refused if number in seccomp.REFUSED.values() else {57: again, 58: again, 435: unknown}.get(number, allowed)
        )
        assert outcome(number) == (unknown if number > 462 else expected), number
    assert outcome(39, architecture=0x40000003) == killed
    assert (outcome(53, 1), outcome(53, 2)) == (allowed, refused)
    thread = 0x3D0F00
    assert (outcome(56, thread), outcome(56, 17), outcome(56, thread | 0x10000000)) == (allowed, again, refused)


def test_a_client_that_dies_takes_its_runs_along(tmp_path: Path) -> None:
    """The client is killed while a run sleeps: its server and the run are gone."""
    code = (
        f"import sys\nsys.path.append({ROOT!r})\nfrom rollout.tools.sandbox.sandbox import Limits, Sandbox\n"
        "s = Sandbox(Limits(wall_seconds=1000), backend='namespaces')\ns.start()\n"
        "print(s._server._process.pid, flush=True)\ns.run('import time\\ntime.sleep(1000)')"
    )
    client = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    server = os.pidfd_open(int(client.stdout.readline()))
    client.kill()
    client.wait()
    assert select.select([server], [], [], 60)[0]


def runs_as_the_machines_root() -> bool:
    """Whether no other user is mapped here: runs are the machine's root then, whose threads the kernel never bounds."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [line.split() for line in lines] == [["0", "0", "1"]]


def test_the_bound_of_threads_is_each_programs_own() -> None:
    hold = "import threading, time\nfor _ in range(12): threading.Thread(target=time.sleep, args=(0.5,)).start()"
    box = Sandbox(Limits(tasks=16, memory_bytes=4 << 30))
    assert [run.output for run in box.run_all([Program(hold)] * 4)] == [""] * 4
    refused = "can't start new thread" in box.run(hold.replace("12", "20")).output
    assert refused is not runs_as_the_machines_root()
    box.close()


def test_bubblewrap_shows_all_modules_of_the_server() -> None:
    """Seen without that program: what the server imports of this library is what a run's root has."""
    code = f"import sys; sys.path.append({ROOT!r}); from rollout.tools.sandbox import server; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    imported = {name.rpartition(".")[2] for name in done.stdout.split() if name.startswith("rollout.tools.sandbox.")}
    command = bubblewrap_command("bwrap", Path(ROOT), [], 1, (), ())
    shown = {Path(word).stem for word in command if word.startswith("/server/") and not word.endswith("__init__.py")}
    assert imported <= shown
