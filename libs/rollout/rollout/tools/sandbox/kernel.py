"""System calls that Python 3.11 lacks, by ctypes: namespaces, mounts, capabilities.

Each raises OSError that names the call. Standard library alone: this runs in the sandbox's server, which has no other.
"""

import contextlib
import ctypes
import os
import struct

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MS_NOATIME, MS_NODIRATIME, MS_RELATIME = 1024, 2048, 1 << 21
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int, call: str) -> None:
    """Raise OSError with the call's name where a libc function returned -1."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces of these kinds."""
    checked(libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None) -> None:
    """Mount a file system, or bind or remount one."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    checked(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount {source} on {target}")


def umount(target: str) -> None:
    """Detach a mount, also one that is still in use."""
    checked(libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root, and mount the old one on `old` below it."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: its number on {os.uname().machine} is not known")
    checked(libc.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")


def bind_read_only(source: str, target: str, devices: bool = False) -> None:
    """Mount a file or folder read-only at another place; flags that its mount already has can't be dropped."""
    mount(source, target, flags=MS_BIND)
    has = os.statvfs(target).f_flag
    inherited = sum(
        flag
        for bit, flag in (
            (os.ST_NOEXEC, MS_NOEXEC), (os.ST_NODEV, MS_NODEV), (os.ST_NOATIME, MS_NOATIME),
            (os.ST_NODIRATIME, MS_NODIRATIME), (os.ST_RELATIME, MS_RELATIME),
        )
        if has & bit
    )  # fmt: skip
    wanted = MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV)
    mount("none", target, flags=MS_REMOUNT | MS_BIND | wanted | inherited)


def kill_with_parent() -> None:
    """Set this process to be killed when its parent ends."""
    checked(libc.prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0), "prctl")


def drop_capabilities(user: int, count_apart: bool = False) -> None:
    """Change to this user (and group) without any capability, for good: not even an executable can give one back.

    In a user namespace that maps this user alone, there are no groups to leave. `count_apart`: in a user namespace of
    this process, in which the kernel counts its threads apart from those of others of the user.
    """
    capability = 0
    while libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    with contextlib.suppress(PermissionError):
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    if count_apart:
        with contextlib.suppress(OSError):  # bubblewrap's own, or none where that program alone may make them
            unshare(CLONE_NEWUSER)
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    checked(libc.capset(header, ctypes.create_string_buffer(24)), "capset")
    checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
