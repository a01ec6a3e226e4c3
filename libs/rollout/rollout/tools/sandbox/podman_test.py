"""The command line of podman's container, and sessions in an image; `session_test` has what both backends promise."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from rollout.tools.sandbox.errors import SandboxRefusedError
from rollout.tools.sandbox.namespaces import visible_paths
from rollout.tools.sandbox.podman import CAPABILITIES, find_podman, podman_command, with_socket
from rollout.tools.sandbox.session import SessionSandbox
from rollout.tools.session_tools import shell_tool


@pytest.fixture(scope="module")
def podman() -> str:
    """The path of a podman that runs a container here."""
    try:
        sandbox = SessionSandbox(backend="podman")
        sandbox.start()
        sandbox.close()
    except SandboxRefusedError as error:
        pytest.skip(f"podman can't run a container here: {error}")
    return find_podman()


def command(image: str | None) -> list[str]:
    most = {"nofile": 100}
    return podman_command("/p", Path("/lib/of"), ["/mine"], ["/usr/bin", "/nowhere"], "/a/sandbox-x", image, most)


@pytest.mark.parametrize("image", [None, "localhost/mine"])
def test_a_container_is_confined(image: str | None) -> None:
    words = command(image)
    assert words[:3] == ["/p", "run", "--rm"]
    for word in ("--network=none", "--read-only", "--cap-drop=all", "--pull=never", "--name=sandbox-x"):
        assert word in words
    assert [w for w in words if w.startswith("--cap-add")] == [f"--cap-add={','.join(CAPABILITIES)}"]
    assert "--ulimit=nofile=100:100" in words
    volumes = [w for w in words if w.startswith("--volume=")]
    assert all(w.endswith(":ro") for w in volumes)
    assert "--volume=/mine:/mine:ro" in volumes
    assert ("--volume=/nowhere:/nowhere:ro" in volumes) == (image is None)


def test_an_image_brings_its_own_programs() -> None:
    ours, its = command(None), command("localhost/mine")
    assert ours[ours.index("--rootfs") + 1] == "/a/sandbox-x"
    assert os.path.realpath(sys.executable) in ours
    assert its[its.index("localhost/mine") + 1] == "python3"
    assert "--rootfs" not in its
    assert its[-1].endswith("server.contained(3, ['/mine'], True)")


def test_the_socket_gets_the_number_that_podman_passes_on() -> None:
    read, write = os.pipe()
    os.write(write, b"seen")
    os.close(write)
    told = subprocess.check_output(with_socket(["/bin/cat", "/dev/fd/3"], read), pass_fds=[read])
    os.close(read)
    assert told == b"seen"


def test_what_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="backend must be auto, namespaces or podman, got 'docker'"):
        SessionSandbox(backend="docker")
    with pytest.raises(ValueError, match="give backend='podman' too"):
        shell_tool(image="localhost/mine")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SandboxRefusedError, match="podman is not installed"):
        find_podman()
    with pytest.raises(SandboxRefusedError, match="podman: podman is not installed"):
        shell_tool(backend="podman")


def test_a_session_has_the_files_of_its_image(tmp_path: Path, podman: str) -> None:
    """An image of this interpreter, bash, ls and a file of its own, which no registry ever had."""
    name = f"localhost/{tmp_path.name.lower().strip('_')}"
    tar = tmp_path / "files.tar"
    with tarfile.open(tar, "w") as archive:
        own = tmp_path / "own"
        own.write_text("of the image\n")
        archive.add(own, "opt/own")
        programs = [os.path.realpath(sys.executable), "/bin/bash", "/bin/ls", "/bin/cat"]
        libraries = [library for program in programs for library in libraries_of(program)]
        for path in {*programs, *visible_paths(), *libraries}:
            archive.add(os.path.realpath(path), path.lstrip("/"), filter=lambda entry: wanted(archive, entry))
        link = tarfile.TarInfo("usr/bin/python3")
        link.type, link.linkname = tarfile.SYMTYPE, os.path.realpath(sys.executable)
        archive.addfile(link)
    done = subprocess.run([podman, "import", "--quiet", str(tar), name], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sandbox = SessionSandbox(backend="podman", image=name)
    try:
        session = sandbox.open()
        assert session.shell("cat /opt/own; echo kept > ~/file").output == "of the image\n"
        assert session.python("open('file').read()").output == "'kept\\n'\n"
        assert "not found" in session.shell("git --version").output
        assert session.shell("echo x > /opt/own").status == 1
        session.close()
    finally:
        sandbox.close()
        subprocess.run([podman, "rmi", "--force", name], check=True, capture_output=True)


def test_an_image_that_is_not_here_is_not_pulled(podman: str) -> None:
    assert podman
    with pytest.raises(SandboxRefusedError, match="localhost/nobody-has-this"):
        SessionSandbox(backend="podman", image="localhost/nobody-has-this").start()


def wanted(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    left_out = ("/test", "/tests", "/site-packages", "/dist-packages", "/__pycache__", "/idlelib", "/lib2to3", ".a")
    return None if entry.name.endswith(left_out) or entry.name in archive.getnames() else entry


def libraries_of(program: str) -> list[str]:
    told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return [word for word in told.split() if word.startswith("/")]
