"""Build the stand-in's library with the C++ compiler of this machine: once for each state of its sources."""

import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.cpp_extension import include_paths, library_paths

from engines.private_api import load_group_bases

HERE = Path(__file__).parent
NAME = "npu_stand_in"
BUILT = HERE / f"{NAME}.so"
"""Path where Bazel puts the library; empty where it could not be built."""
LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def reason_against() -> str | None:
    """Return why the library cannot be built here; None where it can."""
    if compiler() is None:
        return "no C++ compiler: install g++, or name one in CXX"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "no Python.h: install the development files of this Python"
    return None


def compiler() -> str | None:
    """Return the compiler that CXX names, or g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


def load_library() -> ModuleType:
    """Import the library, built where nobody did before. ValueError where there is no compiler; CalledProcessError has
    its words."""
    if reason := reason_against():
        raise ValueError(f"the stand-in for NPUs is built from source: {reason}")
    path = BUILT
    if not path.exists() or path.stat().st_size == 0:
        path = folder() / BUILT.name
        if not path.exists():
            build(path)
    load_group_bases()
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def folder() -> Path:
    """Return the folder of the built library: this user's alone, in the directory for temporary files, named by the
    sources."""
    sources = sorted([*HERE.glob("*.h"), *HERE.glob("*.cpp")])
    digest = hashlib.sha256("".join([torch.__version__, *(path.read_text() for path in sources)]).encode())
    cache = Path(tempfile.gettempdir()) / f"{NAME}_{os.getuid()}_{digest.hexdigest()[:16]}"
    cache.mkdir(mode=0o700, exist_ok=True)
    if cache.stat().st_uid != os.getuid() or cache.stat().st_mode & 0o022:
        raise ValueError(f"{cache} can be written by others: remove it")
    return cache


def build(path: Path) -> None:
    """Compile beside `path` and rename: readers find all of it or nothing, and two builders do no harm."""
    includes = [sysconfig.get_paths()["include"], *include_paths(), str(HERE)]
    flags = ["-std=c++20", "-O1", "-fPIC", "-shared", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    flags += [f"-ffile-prefix-map={HERE}=npu"]  # the same bytes, wherever the sources lie
    flags += [f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        command = [str(compiler()), *flags, *(f"-I{name}" for name in includes), str(HERE / "stand_in.cpp")]
        command += ["-o", str(made), *(f"-L{name}" for name in library_paths()), *(f"-l{name}" for name in LIBRARIES)]
        command += loaded("libstdc++.so.6")
        subprocess.run(command, check=True, capture_output=True, text=True)
        made.rename(path)


def loaded(name: str) -> list[str]:
    """Return the paths of this process's libraries whose file's name begins so.

    torch brings the library of C++, and two of them do not mix: some compilers link a part of their own into ours, and
    formatting a number ended the process then.
    """
    paths = (line.split(maxsplit=5)[5:] for line in Path("/proc/self/maps").read_text().splitlines())
    return sorted({path[0] for path in paths if path and Path(path[0]).name.startswith(name)})[:1]
