"""Attacks of a hostile program on the sandbox.

Each prints ESCAPED where it succeeds; each entry has the output that is expected instead.
"""

import re

DENIED = "PermissionError|Operation not permitted"
NO_SUCH = "FileNotFoundError|No such file"

CALL = """
import ctypes, os
def call(number, *arguments):
    libc = ctypes.CDLL(None, use_errno=True)
    result = libc.syscall(ctypes.c_long(number), *(a if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("ESCAPED", number, result)
"""

# #### name -> the expected output (a regular expression), and the program; CALL is the function above
PROGRAMS = r"""

######## the network and sockets of the host
#### tcp to the host -> DENIED
import socket
s = socket.create_connection(('127.0.0.1', {port}), 2)
print('ESCAPED')
#### udp -> DENIED
import socket
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 53))
print('ESCAPED')
#### raw packets -> DENIED
import socket
socket.socket(17, socket.SOCK_RAW)
print('ESCAPED')
#### netlink -> DENIED
import socket
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)
print('ESCAPED')
#### abstract socket of the host -> DENIED
import socket
s = socket.socket(socket.AF_UNIX)
s.connect('\0{abstract}')
print('ESCAPED')
#### other families by socketpair -> DENIED|not supported
import socket
socket.socketpair(socket.AF_INET)
print('ESCAPED')

######## files of the host
#### passwd -> NO_SUCH
print('ESCAPED', open('/etc/passwd').read())
#### a secret of the host -> NO_SUCH
print('ESCAPED', open({secret!r}).read())
#### writing outside -> NO_SUCH|Read-only
open({outside!r}, 'w').write('x')
print('ESCAPED')
#### writing to the standard library -> Read-only|DENIED
import os
open(os.__file__, 'a').write('x')
print('ESCAPED')
#### writing to the root -> Read-only|DENIED
open('/x', 'w')
print('ESCAPED')
#### a link to a file of the host -> NO_SUCH
import os
os.symlink('/etc/passwd', 'x')
print('ESCAPED', open('x').read())
#### a hard link into the host -> OSError|DENIED
import os
os.link(os.__file__, '/tmp/x')
print('ESCAPED')
#### above the root -> \['tmp'|'dev'
import os
os.chdir('/' + '../' * 50)
print('ESCAPED' if os.path.exists('etc') else os.listdir('.'))
#### looking everywhere -> nothing
import os
for folder, folders, files in os.walk('/'):
    for name in ('shadow', 'secret', 'machine-id', 'old'):
        if name in files or name in folders:
            print('ESCAPED', folder, name)
print('nothing')
1 / 0
#### chroot out -> DENIED
import os
os.mkdir('x')
os.chroot('x')
print('ESCAPED')
#### by file handle -> Operation not permitted
CALL
call(304, -100, b'x' * 64, 0)
#### set-user-id file -> False|Error
import os, shutil, sys
shutil.copy(sys.executable, 'p')
os.chmod('p', 0o4755)
os.execv('./p', ['p', '-I', '-S', '-c', 'import os; print(os.geteuid() == 0 and "ESCAPED")'])
#### packages of the host -> ModuleNotFoundError
import torch
print('ESCAPED')
#### packages beside the standard library -> ModuleNotFoundError
import pip
print('ESCAPED')
#### this library -> ModuleNotFoundError
import rollout.tools.sandbox.server
print('ESCAPED')
#### programs of the host -> NO_SUCH
import os
os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED'])

######## processes, the kernel
#### proc -> NO_SUCH
import os
print('ESCAPED', os.listdir('/proc'))
#### sys -> NO_SUCH
import os
print('ESCAPED', os.listdir('/sys'))
#### devices -> NO_SUCH
import os
print(sorted(os.listdir('/dev')))
open('/dev/mem')
print('ESCAPED')
#### making a device -> DENIED
import os, stat
os.mknod('d', 0o600 | stat.S_IFBLK, os.makedev(8, 0))
open('d')
print('ESCAPED')
#### shared memory files -> NO_SUCH
import os
print('ESCAPED', os.listdir('/dev/shm'))
#### killing a process of the host -> ProcessLookupError
import os
os.kill({pid}, 9)
print('ESCAPED')
#### killing the warden -> PermissionError|the warden lives
import os, time
os.kill(1, 9)
os.kill(1, 19)
time.sleep(0.2)
print('the warden lives')
1 / 0
#### killing everybody -> ProcessLookupError|^$
import os
os.kill(-1, 9)
print('ESCAPED')
#### ptrace -> Operation not permitted
CALL
call(101, 16, 1, 0, 0)
#### memory of the warden -> Operation not permitted
CALL
call(310, 1, 0, 0, 0, 0, 0)
#### root -> DENIED|Invalid argument
import os
os.setresuid(0, 0, 0)
print('ESCAPED')
#### mounting -> Operation not permitted
CALL
call(165, b'none', b'/tmp', b'tmpfs', 0, 0)
#### remounting for writing -> Operation not permitted
CALL
call(165, b'none', b'/', b'', 32 | 4096, 0)
#### unmounting -> Operation not permitted
CALL
call(166, b'/tmp', 2)
#### a user namespace -> Operation not permitted
CALL
call(272, 0x10000000)
#### a user namespace by clone -> Operation not permitted
CALL
call(56, 0x10000000 | 17, 0, 0, 0, 0)
#### a user namespace by clone3 -> Function not implemented
CALL
call(435, b'\0' * 88, 88)
#### entering a namespace -> Operation not permitted
CALL
call(308, 0, 0)
#### keyrings -> Operation not permitted
CALL
call(250, 0, -4, 1)
#### adding a key -> Operation not permitted
CALL
call(248, b'user', b'x', b'y', 1, -4)
#### bpf -> Operation not permitted
CALL
call(321, 0, 0, 0)
#### io_uring -> Operation not permitted
CALL
call(425, 1, 0)
#### userfaultfd -> Operation not permitted
CALL
call(323, 0)
#### perf events -> Operation not permitted
CALL
call(298, 0, 0, -1, -1, 0)
#### calls nobody has heard of -> Function not implemented
CALL
call(1000, 0)
#### calls of x32 -> Function not implemented
CALL
call(0x40000000 + 39)
#### calls of 32 bits -> ^$
import ctypes, mmap
m = mmap.mmap(-1, 4096, prot=7)
m.write(b'\xb8\x14\0\0\0\xcd\x80\xc3')
print('ESCAPED', ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))())
#### the clock -> DENIED
import time
time.clock_settime(time.CLOCK_REALTIME, 0)
print('ESCAPED')
#### the host's name -> DENIED
import socket
socket.sethostname('x')
print('ESCAPED')
#### higher limits -> ValueError|DENIED
import resource
resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
print('ESCAPED')
#### a higher priority -> DENIED
import os
os.nice(-20)
print('ESCAPED')
#### variables of the host -> nothing
import ctypes, os
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
print('ESCAPED' if os.environ.get('SECRET') or libc.getenv(b'SECRET') else 'nothing')
1 / 0
#### open descriptors -> at most its result
import os
found = []
for i in range(3, 1000):
    try:
        os.fstat(i)
        found.append(i)
    except OSError: pass
print('ESCAPED' if len(found) > 1 else 'at most its result')
1 / 0

######## using the host up
#### fork -> BlockingIOError
import os
os.fork()
print('ESCAPED')
#### fork by another interpreter -> BlockingIOError
import os, sys
os.execv(sys.executable, ['p', '-I', '-S', '-c', 'import os; os.fork(); print("ESCAPED")'])
#### subprocess -> BlockingIOError
import subprocess, sys
subprocess.run([sys.executable, '-c', ''])
print('ESCAPED')
#### threads without end -> can't start new thread|MemoryError
import threading, time
for i in range(5000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print('ESCAPED')
#### memory -> MemoryError
x = bytearray(1 << 30)
print('ESCAPED')
#### memory bit by bit -> MemoryError
x = []
while True: x.append(bytearray(1 << 20))
#### shared memory -> OSError|MemoryError
import mmap
x = [mmap.mmap(-1, 1 << 26) for i in range(8)]
print('ESCAPED')
#### memory files -> DENIED
import os
os.memfd_create('x')
print('ESCAPED')
#### memory of System V -> Operation not permitted
CALL
call(29, 0, 1 << 20, 0o1600)
#### locked memory -> OSError
CALL
call(325, 0, 1 << 24, 0)
#### a file too large -> OSError|^$
f = open('x', 'wb')
for i in range(10): f.write(bytes(1 << 20)); f.flush()
print('ESCAPED')
#### files that are too large together -> No space left
for i in range(10): open(str(i), 'wb').write(bytes(1 << 20))
print('ESCAPED')
#### too many files -> No space left
for i in range(100): open(str(i), 'w').close()
print('ESCAPED')
#### too many descriptors -> Too many open files
x = [open('/dev/null') for i in range(200)]
print('ESCAPED')
#### a core file -> ^$|Aborted
import os
os.abort()
"""


def programs() -> dict[str, tuple[str, str]]:
    """Return each program and a regular expression of its expected output, by name."""
    entries = {}
    for head, code in re.findall(r"^#### (.*)\n((?:(?!####).*\n)+)", PROGRAMS, re.MULTILINE):
        name, _, output = head.partition(" -> ")
        output = output.replace("DENIED", DENIED).replace("NO_SUCH", NO_SUCH)
        entries[name] = (code.replace("CALL\n", CALL), output)
    return entries


ESCAPES = programs()
"""Their places in braces ({port}, {secret}, ...) are filled in by the test."""
