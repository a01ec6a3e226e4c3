"""The formatter of BUILD files: `./bazelw run //build:buildifier` looks, `-- -mode=fix` writes.

Its makers publish the binaries of one version as an npm package. `npm` fetches that, from the registry it is configured
for; the archive is held to the hash below and kept in the user's cache. A `buildifier` of this version on the PATH is
taken as it is.
"""

import base64
import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

VERSION = "8.2.1"
INTEGRITY = "sha512-eZ/Aq+2r4PcJa6LbPCT6ffgIJfTU/gYilqIzoX2OLM4nNkbQC6tTMPZNn7aHHjhGPxbNLv41zm4Xqt1olCLgXw=="
PROCESSORS = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64"}
CHECKS = ["-mode=check", "-lint=warn"]


def binary_in(archive: bytes, integrity: str, processor: str) -> bytes:
    """Return the binary for Linux on this processor; ValueError for another archive than the pinned one."""
    actual = "sha512-" + base64.b64encode(hashlib.sha512(archive).digest()).decode()
    if actual != integrity:
        raise ValueError(f"npm gave an archive with {actual}, and build/buildifier.py lists {integrity}")
    if processor not in PROCESSORS:
        raise ValueError(f"no buildifier for {processor}; there is one for {', '.join(PROCESSORS)}")
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        member = tar.extractfile(f"package/buildifier-linux_{PROCESSORS[processor]}")
        assert member is not None
        return member.read()


def fetch() -> bytes:
    """Fetch the archive by npm."""
    if shutil.which("npm") is None:
        sys.exit("buildifier comes by npm, which is not here. Fix (Debian): apt-get install npm")
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"@bazel/buildifier@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", wanted], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        return archive.read_bytes()


def installed() -> Path:
    """Return the binary: on the PATH, in the cache, or fetched into it."""
    here = shutil.which("buildifier")
    if here and VERSION in subprocess.run([here, "-version"], capture_output=True, check=False, text=True).stdout:
        return Path(here)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tessera")
    binary = cache / f"buildifier-{VERSION}"
    if not binary.is_file():
        cache.mkdir(parents=True, exist_ok=True)
        temporary = binary.with_name(f"{binary.name}.{os.getpid()}")
        temporary.write_bytes(binary_in(fetch(), INTEGRITY, platform.machine()))
        temporary.chmod(0o755)
        temporary.replace(binary)
    return binary


def files() -> list[str]:
    """Return the tracked files in Bazel's language, without the stand-in for rules_python's native rules."""
    names = ["BUILD", "*.bazel", "*.bzl", "WORKSPACE", ":!third_party/rules_python"]
    listed = subprocess.run(["git", "ls-files", "-z", *names], capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name]


def main() -> None:
    """Run `buildifier.py [OPTIONS]` over the whole tree."""
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    binary = installed()
    os.execv(binary, ["buildifier", *(sys.argv[1:] or CHECKS), *files()])


if __name__ == "__main__":
    main()
