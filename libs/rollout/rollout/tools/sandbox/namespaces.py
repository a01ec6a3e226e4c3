"""The namespaces of the sandbox: user, mount, process, network and IPC, and a root with very few files.

1. The parent maps user ids, since a process can't map more than its own: with the rights for it, root and nobody (runs
   are nobody, also to the host); without, the caller's own id as nobody.
2. The new root is a file system in memory. Into it go, read-only, the interpreter, its standard library, the shared
   libraries that this process has mapped, five devices and an empty /tmp. There is no /proc, no /sys, no socket.
3. pivot_root, and the old root is unmounted: no path leads back.
"""

import glob
import os
import sys
from collections.abc import Iterable

from rollout.tools.sandbox import kernel

NOBODY = 65534
DEVICES = ("null", "zero", "full", "urandom", "random")
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")
_FOREIGN = ("site-packages", "dist-packages")  # other people's packages within the standard library's folder
_BASE = "/tmp"
_PROGRAMS = ("/usr/bin", "/usr/lib", "/usr/lib64", "/usr/libexec", "/bin", "/lib", "/lib64", "/etc/alternatives")
OWN_PROGRAMS = "/programs"
"""Where the interpreter has its usual names."""
PATH = f"{OWN_PROGRAMS}:/usr/bin:/bin"
"""Where a shell looks for programs."""


def visible_paths(packages: Iterable[str] = (), programs: bool = False) -> list[str]:
    """Return the paths of the host that a run may see: the interpreter, its standard library and shared libraries.

    With `programs` those of /usr/bin are among them, and all that lies in /usr/lib.
    Shared libraries are found in /proc/self/maps, after the modules that a run may import were imported.
    """
    paths = {os.path.realpath(sys.executable), *packages}
    paths |= {p for p in map(os.path.realpath, sys.path) if os.path.exists(p) and not _is_own(p)}
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[5].strip() for line in maps if line.count("/")}
    for path in mapped:
        if path.startswith("/") and os.path.isfile(path):
            stem = glob.escape(path.partition(".so")[0]) if ".so" in path else None
            names = glob.glob(f"{stem}.so*") if stem else []  # the loader looks for libffi.so.8, not libffi.so.8.1.2
            paths |= {path, *(name for name in names if os.path.realpath(name) == path)}
    paths |= {p for p in (*_LOADERS, *(_PROGRAMS if programs else ())) if os.path.exists(p)}
    return [p for p in sorted(paths) if not any(p != q and p.startswith(q + "/") for q in paths)]


def visible_in_image(packages: Iterable[str] = ()) -> list[str]:
    """Return the paths of a container's image that a run may see: all but those that the container itself mounts."""
    own = ("proc", "sys", "dev", "run", "tmp", "server", OWN_PROGRAMS.strip("/"))
    paths = [f"/{name}" for name in os.listdir("/") if name not in own and os.path.isdir(f"/{name}")]
    return sorted([*paths, *(p for p in packages if not any(p.startswith(q + "/") for q in paths))])


def work_folder(paths: Iterable[str]) -> str:
    """Return the working folder of runs: /tmp, unless a visible path lies in there."""
    return "/workspace" if any(path.startswith("/tmp/") for path in paths) else "/tmp"


def _is_own(path: str) -> bool:
    """Return whether the path holds this library rather than Python's."""
    return os.path.exists(os.path.join(path, "rollout", "tools", "sandbox", "namespaces.py"))


def map_users(pid: int) -> None:
    """Map user ids, from outside, for a process that has just left its user namespace."""
    user, group = os.geteuid(), os.getegid()
    try:
        if user != 0:
            raise PermissionError
        _write(pid, "uid_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        _write(pid, "gid_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
    except PermissionError:  # only the caller's own id can be mapped
        _write(pid, "uid_map", f"{NOBODY} {user} 1\n")
        _write(pid, "setgroups", "deny")
        _write(pid, "gid_map", f"{NOBODY} {group} 1\n")


def _write(pid: int, name: str, text: str) -> None:
    descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def move_in(paths: Iterable[str], programs: bool = False) -> None:
    """Build the root in the new namespaces, enter it, and unmount the old one. The paths are mounted read-only.

    With `programs` the interpreter gets its usual names in `PATH`; there is no /dev/zero then: what it gives to several
    processes is memory that no count shows.
    """
    real = {path: os.path.realpath(path) for path in paths}  # while links still lead where they lead on the host
    kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", _BASE, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    os.mkdir(f"{_BASE}/old")
    kernel.pivot_root(_BASE, f"{_BASE}/old")
    os.chdir("/")
    for path, source in real.items():
        _show(source, path)
    for name in DEVICES:
        if not (programs and name == "zero"):
            _show(f"/dev/{name}", f"/dev/{name}", devices=True)
    if programs:
        os.mkdir(OWN_PROGRAMS)
        for name in ("python", "python3"):
            os.symlink(os.path.realpath(sys.executable), f"{OWN_PROGRAMS}/{name}")
    os.makedirs(work_folder(real), exist_ok=True)
    kernel.umount("/old")
    os.rmdir("/old")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", flags=flags)


def _show(source: str, path: str, devices: bool = False) -> None:
    source = f"/old{source}"
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.bind_read_only(source, path, devices)
    hidden = kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    for folder in (
        f"{place}/{name}" for place in (path, *glob.glob(f"{glob.escape(path)}/python3*")) for name in _FOREIGN
    ):
        if os.path.isdir(folder):
            kernel.mount("tmpfs", folder, "tmpfs", hidden)


def mount_work_folder(folder: str, file_bytes: int, files: int) -> None:
    """Mount the working folder in a run's own namespace, with this size and number of files; it ends with the run."""
    data = f"size={file_bytes},nr_inodes={files},mode=1777"
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", folder, "tmpfs", flags, data)
    os.chdir(folder)


def bound_files(file_bytes: int, files: int) -> bool:
    """Bound the number of files of the working folder, a file system of its own that another program mounted.

    Returns False where this process has no right to, in its namespace.
    """
    flags = kernel.MS_REMOUNT | kernel.MS_NOSUID | kernel.MS_NODEV
    try:
        kernel.mount("none", os.getcwd(), flags=flags, data=f"size={file_bytes},nr_inodes={files}")
    except PermissionError:
        return False
    return True
