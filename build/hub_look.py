"""Which packages of a hub differ from their installation: bazelw asks before Bazel builds and reruns their users.

Each package's folder is one input to Bazel, which does not look into it. Beside the folder of one that was changed by
hand lies `changed.txt`, an input too: a digest of all that the folder holds. Beside others lies none, so that what
depends on them has the same keys in any clone, also after a change was taken back.

A look compares what the file system says of each file with what it said at the last look; only the folders of those
that differ are read. Byte code in a hub is never checked against its source, so a changed source is compiled again.
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import stat
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from install_hub import SITE, compile_source

INSTALLED = "installed.json"
"""The interpreter and each folder's digest, from the hub's installation."""
SEEN = "seen"
"""The output of FIND at the last look; bazelw compares it with the present one."""
FIND = r"find ./*/site-packages ./wheels -printf '%p %i %s %C@\0'"
STAMP = "changed.txt"
TAG = str(sys.implementation.cache_tag)
UNCHECKED = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little")
"""The head of byte code that has its source's hash, and is not checked."""


def folders(hub: Path) -> list[str]:
    """Return the folders that are inputs to Bazel."""
    return sorted(str(path.relative_to(hub)) for path in [*hub.glob(f"*/{SITE}"), *hub.glob("wheels")])


def listing(hub: Path) -> bytes:
    """Return name, inode, size and time of the last change of any kind (which nobody can set) of all files."""
    done = subprocess.run(
        ["sh", "-c", FIND], cwd=hub, env={**os.environ, "LC_ALL": "C"}, capture_output=True, check=False
    )
    if not done.stdout:
        sys.exit(f"{FIND} said nothing in {hub}; it has to be GNU's (Debian: findutils). {done.stderr.decode()}")
    return done.stdout


def folder_of(entry: bytes) -> str:
    """Return the folder of `folders` in which an entry of the listing lies."""
    parts = os.fsdecode(entry.rsplit(b" ", 3)[0]).split("/")[1:]
    return "/".join(parts[:2]) if parts[1:2] == [SITE] else parts[0]


def digest_of_file(path: str) -> str:
    """Return the digest of a link's target, or of a file's bytes and mode; of nothing for one that has gone."""
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            return "link " + os.readlink(path)
        if not stat.S_ISREG(mode):
            return "no file"
        with open(path, "rb") as file:
            return ("program " if mode & 0o100 else "file ") + hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return ""


def digest(hub: Path, folder: str) -> str:
    """Return one digest of all names, bytes and links in a folder: the same wherever and whenever it was installed."""
    total = hashlib.sha256()
    for place, inner, files in os.walk(hub / folder):
        inner.sort()
        links = [name for name in inner if os.path.islink(os.path.join(place, name))]
        lines = [f"{name} {digest_of_file(os.path.join(place, name))}" for name in sorted(files + links)]
        words = "\n".join([os.path.relpath(place, hub), *lines, ""])
        total.update(words.encode(errors="surrogateescape"))
    return total.hexdigest()


def fits(hub: Path, source: Path, cached: Path) -> bool:
    """Return whether byte code is that of this source at this path (a moved one names another path)."""
    try:
        code = cached.read_bytes()
        name = str(source.relative_to(hub)).encode(errors="surrogatepass")
        return code[:16] == UNCHECKED + importlib.util.source_hash(source.read_bytes()) and name in code
    except OSError:
        return False


def compile_changed(hub: Path, folder: str) -> None:
    """Compile the sources whose byte code is not their own."""
    for source in (hub / folder).rglob("*.py"):
        cached = Path(importlib.util.cache_from_source(str(source)))
        if source.is_file() and not fits(hub, source, cached):
            cached.unlink(missing_ok=True)  # a source that is no Python any more must not run as it was
            compile_source(hub, source)


def remove_strays(hub: Path, folder: str) -> None:
    """Remove byte code of sources that are gone, and files that pytest or another Python left."""
    for cached in (hub / folder).rglob("__pycache__/*.pyc"):
        source = cached.parents[1] / cached.name.replace(f".{TAG}.pyc", ".py")
        if source.suffix != ".py" or not source.is_file():
            cached.unlink(missing_ok=True)
            if not os.listdir(cached.parent):
                cached.parent.rmdir()


def digest_of_installed(hub: Path, folder: str) -> str:
    """Return the digest of a folder that has just been installed."""
    remove_strays(hub, folder)
    return digest(hub, folder)


def write(path: Path, data: bytes) -> None:
    """Write a whole file at once."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(path)


def stamp(hub: Path, folder: str, now: str, installed: str) -> None:
    """Write a stamp with the folder's digest beside it, where it differs from what was installed."""
    path = (hub / folder).parent / STAMP
    if not path.parent.is_dir():
        return  # Bazel misses its BUILD file
    before = path.read_text() if path.exists() else installed
    if now == before:
        return
    if now == installed:
        path.unlink()
    else:
        write(path, now.encode())
    name = f"@{hub.name}//{Path(folder).parts[0]}"
    print(f"bazelw: {name} {'is as installed again' if now == installed else 'was changed by hand'}", file=sys.stderr)


def look(hub: Path, installed: dict[str, str]) -> bool:
    """Write stamps for the folders that changed since the last look; return whether there were any.

    The stored listing is from before anything was read: a change meanwhile differs again at the next look.
    """
    now, seen = listing(hub), hub / SEEN
    before = seen.read_bytes() if seen.exists() else b""
    differing = set(now.split(b"\0")) ^ set(before.split(b"\0"))
    changed = {folder_of(entry) for entry in differing if entry} & installed.keys() if before else set(installed)
    for folder in sorted(changed):
        compile_changed(hub, folder)
        remove_strays(hub, folder)
        stamp(hub, folder, digest(hub, folder), installed[folder])
    write(seen, now)
    return bool(changed)


def remember(hub: Path) -> None:
    """Record the listing and digests of a hub that has just been installed."""
    names = folders(hub)
    with ProcessPoolExecutor() as pool:
        digests = dict(zip(names, pool.map(partial(digest_of_installed, hub), names), strict=True))
    write(hub / SEEN, listing(hub))
    write(hub / INSTALLED, json.dumps({"python": sys.executable, "tag": TAG, "digests": digests}, indent=1).encode())


def look_and_stamp(hub: Path) -> None:
    """Look and stamp, by the Python with which the hub was installed and by one process at a time."""
    made = json.loads((hub / INSTALLED).read_text())
    if made["tag"] != TAG:
        os.execv(made["python"], [made["python"], "-BEs", __file__, str(hub)])
    with (hub / INSTALLED).open() as alone:
        fcntl.flock(alone, fcntl.LOCK_EX)
        # What the first look compiled is new to the second, to which nothing but that is.
        if look(hub, made["digests"]):
            look(hub, made["digests"])


def main() -> None:
    """Run `hub_look.py HUB`, or `hub_look.py --installed HUB` at the end of its installation."""
    warnings.simplefilter("ignore")  # about other people's sources
    if sys.argv[1] == "--installed":
        remember(Path(sys.argv[2]))
    else:
        look_and_stamp(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
