"""A filter of system calls: those that reach beyond the sandbox, or take memory that no limit counts, fail.

A list of refused calls, in classic BPF: by number, with `clone` and `socketpair` by their first argument. Numbers
beyond this list are refused too. A process that runs code of another architecture is killed.
"""

import ctypes
import errno
import os
import struct

from rollout.tools.sandbox.kernel import checked, libc

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 40  # offsets in the data a filter sees
_AUDIT_X86_64 = 0xC000003E
_CLONE_THREAD, _CLONE_NAMESPACES, _AF_UNIX = 0x10000, 0x7E020000, 1
_NEWEST = 462  # mseal: the last number that was reviewed

# Refused on x86-64, by their effect.
_TRACING = {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "pidfd_getfd": 438,
            "process_madvise": 440, "process_mrelease": 448, "perf_event_open": 298, "bpf": 321}  # fmt: skip
_MOUNTING = {"mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272, "setns": 308,
             "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
             "mount_setattr": 442, "statmount": 457, "listmount": 458, "name_to_handle_at": 303,
             "open_by_handle_at": 304, "quotactl": 179, "quotactl_fd": 443, "fanotify_init": 300,
             "fanotify_mark": 301, "swapon": 167, "swapoff": 168, "acct": 163}  # fmt: skip
_MACHINE = {"init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
            "reboot": 169, "syslog": 103, "settimeofday": 164, "clock_settime": 227, "adjtimex": 159,
            "clock_adjtime": 305, "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173,
            "modify_ldt": 154, "vhangup": 153, "personality": 135, "lookup_dcookie": 212, "userfaultfd": 323,
            "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "migrate_pages": 256,
            "move_pages": 279, "mbind": 237, "set_mempolicy": 238}  # fmt: skip
_KEYRINGS = {"add_key": 248, "request_key": 249, "keyctl": 250}
_NETWORK = {"socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50, "accept4": 288}
_UNCOUNTED_MEMORY = {"memfd_create": 319, "memfd_secret": 447, "shmget": 29, "shmat": 30, "shmctl": 31, "semget": 64,
                     "msgget": 68, "msgsnd": 69, "mq_open": 240, "vmsplice": 278}  # fmt: skip
REFUSED = {**_TRACING, **_MOUNTING, **_MACHINE, **_KEYRINGS, **_NETWORK, **_UNCOUNTED_MEMORY}
_FORK, _VFORK, _CLONE, _CLONE3, _SOCKETPAIR, _MMAP = 57, 58, 56, 435, 53, 9
_MAP_SHARED, _MAP_ANONYMOUS = 1, 0x20


def program(processes: bool = False) -> bytes:
    """Return the filter as BPF instructions. A process may start threads, but no process: its memory limit is total.

    With `processes` it may start some, and memory that they share has to be a file's.
    """
    refuse, again, unknown = _error(errno.EPERM), _error(errno.EAGAIN), _error(errno.ENOSYS)
    code = [_load(_ARCHITECTURE), _jump(_EQUAL, _AUDIT_X86_64, 1, 0), _return(_KILL), _load(_NUMBER)]
    code += [_jump(_AT_LEAST, _NEWEST + 1, 0, 1), unknown]  # the x32 variants of calls lie there too
    for number in sorted(REFUSED.values()):
        code += [_jump(_EQUAL, number, 0, 1), refuse]
    code += [_jump(_EQUAL, _CLONE3, 0, 1), unknown]  # its flags lie in memory; libc falls back on clone
    if not processes:
        code += [_jump(_EQUAL, _FORK, 0, 1), again, _jump(_EQUAL, _VFORK, 0, 1), again]
    code += [_jump(_EQUAL, _SOCKETPAIR, 0, 4), _load(_FIRST_ARGUMENT), _jump(_EQUAL, _AF_UNIX, 0, 1), _return(_ALLOW)]
    code += [refuse]
    if processes:
        code += [_jump(_EQUAL, _MMAP, 0, 5), _load(_FOURTH_ARGUMENT), _jump(_ANY_BIT, _MAP_ANONYMOUS, 0, 2)]
        code += [_jump(_ANY_BIT, _MAP_SHARED, 0, 1), refuse, _return(_ALLOW)]
    code += [_jump(_EQUAL, _CLONE, 1, 0), _return(_ALLOW), _load(_FIRST_ARGUMENT)]
    code += [_jump(_ANY_BIT, _CLONE_NAMESPACES, 0, 1), refuse]
    if not processes:
        code += [_jump(_ANY_BIT, _CLONE_THREAD, 1, 0), again]
    return b"".join([*code, _return(_ALLOW)])


def install(processes: bool = False) -> None:
    """Filter this process's system calls from now on. Raise OSError where there is no list for its architecture."""
    if os.uname().machine != "x86_64":
        raise OSError(f"seccomp: the numbers of system calls on {os.uname().machine} have to be added and tested first")
    code = program(processes)
    memory = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(struct.pack("H6xQ", len(code) // 8, ctypes.addressof(memory)))
    checked(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0), "seccomp")


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, offset)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", test, if_true, if_false, value)


def _return(action: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, action)


def _error(number: int) -> bytes:
    return _return(_ERRNO | number)
