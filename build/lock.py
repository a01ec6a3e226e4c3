"""Make the lock files again: `./bazelw run //build:lock` (all) or `./bazelw run //build:lock -- tf517` (one).

Each source of HUBS becomes one lock for all of PYTHONS, with the hashes of every file of each pinned version. What
only some of these Pythons need, or need at another version, has a marker, which pip reads. Pins that still fit stay as
they are; `--upgrade` before the names takes the newest instead. A lock for CPUs is the same resolution less the CUDA
libraries, and it also lists the hash of the torch build that this machine's pip prefers (a local +cpu wheel), besides
those it listed before. It ends with an error where one of PYTHONS, or of the processors that the lock is for, finds no
wheel of a package; those in `sources` are built on the machine that has their compiler.
"""

import hashlib
import itertools
import os
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass, field
from pathlib import Path

from install_hub import lock_entries

UV = "uv==0.13.8"  # the resolver
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("aarch64", "x86_64")
# Linux on these processors, CPython: what a lock is for. A marker that says no more than this is left out.
WHERE = ("platform_python_implementation == 'CPython'", "sys_platform == 'linux'")
CUDA_ONLY = re.compile(r"(nvidia-.*|cuda-.*|triton)$")


@dataclass(frozen=True)
class Hub:
    """One lock file: the file of its requirements, whether CUDA libraries stay in, and whether only files are
    wanted."""

    source: str
    cuda: bool = False
    data_only: bool = False  # the packages alone, for files in them; what they would need to run is left out
    over: str = ""  # the lock whose versions hold here too; this one lists only what that one lacks
    shared: tuple[str, ...] = ()  # only these of that lock hold here; all of it where there are none
    without: tuple[str, ...] = ()  # what a package asks for and nobody imports
    machine: str = "x86_64"  # the processor; "" for both of MACHINES
    pythons: tuple[str, ...] = PYTHONS
    sources: dict[str, tuple[str, ...]] = field(default_factory=dict)  # built where they are installed: what they need


HUBS = {
    "cpu": Hub("requirements.in"),
    "cuda": Hub("requirements.in", cuda=True),
    "tf517": Hub("requirements_tf517.in"),
    # trackio wants the fast parts of a web server, which runs where its pages are looked at, and an older pillow.
    "extras": Hub("requirements_extras.in", over="cpu", without=("httptools", "uvloop", "watchfiles")),
    # Its servers import an older mcp than verifiers'; gradio is for pages to look at.
    "openenv": Hub("requirements_openenv.in", over="cpu", without=("gradio", "httptools", "uvloop", "watchfiles")),
    "agents": Hub("requirements_agents.in", over="cpu"),
    "kernels": Hub("requirements_kernels.in", over="cpu"),
    "templates": Hub("requirements_templates.in", data_only=True),
    "corpus": Hub("requirements_corpus.in", data_only=True, sources={"llama-cpp-python": (), "vllm": ()}),
    "tools": Hub("requirements_tools.in"),
    # For pip on machines with accelerators, not for Bazel.
    "recipes_cuda": Hub(
        "requirements_recipes_cuda.in", cuda=True, sources={"causal-conv1d": ("torch", "packaging", "ninja")}
    ),
    # With the CUDA libraries, although no NPU needs them: the index has torch for x86-64 as a CUDA build alone, which
    # neither loads nor passes `pip check` without them.
    "recipes_npu": Hub("requirements_recipes_npu.in", cuda=True, machine=""),
    # vLLM built for no device and its plug-in. triton-ascend, at the version that it pins, is on its makers' index
    # alone; triton would lie in the same folder. What both ask for stands in the source: asking them takes torch.
    "vllm_npu": Hub(
        "requirements_vllm_npu.in",
        cuda=True,
        machine="",
        pythons=("3.11", "3.12"),
        without=("triton", "triton-ascend"),
        sources={"vllm": (), "vllm-ascend": (), "arctic-inference": ()},
    ),
    # torch and what it needs are those of the trainer. The registry's vision and audio wheels are CUDA builds, which a
    # CPU build of torch can't load; third_party/torchvision says so to whoever asks.
    "vllm": Hub(
        "requirements_vllm.in",
        over="cpu",
        shared=(
            "filelock",
            "fsspec",
            "jinja2",
            "markupsafe",
            "mpmath",
            "networkx",
            "setuptools",
            "sympy",
            "torch",
            "typing-extensions",
        ),
        without=("torchvision", "torchaudio", "torchcodec", "triton"),
    ),
}


def shortened(entry: str, where: tuple[str, ...]) -> str:
    """Return a lock entry whose markers leave out the clauses that hold for the whole lock (`where`)."""
    lines = []
    for line in entry.splitlines():
        pinned, _, marker = line.removesuffix(" \\").partition(" ; ")
        if marker:
            for clause in where:
                marker = marker.replace(f" and {clause}", "").replace(f"{clause} and ", "")
            marker = re.sub(r"\((\w+ [=!<>]+ '[^']*')\)", r"\1", marker)
            marker = "" if marker in where else f" ; {marker}"
            line = pinned + marker + (" \\" if line.endswith("\\") else "")
        lines.append(line + "\n")
    return "".join(lines)


def project(hub: Hub) -> tuple[str, tuple[str, ...]]:
    """Return (the resolver's settings for a hub, the clauses of markers that these settings imply)."""
    before = f"python_full_version < '3.{int(hub.pythons[-1].split('.')[1]) + 1}'"
    machines = [hub.machine] if hub.machine else MACHINES
    there = " or ".join(f"platform_machine == '{machine}'" for machine in machines)
    where = (*WHERE, before, there)
    text = f'[tool.uv]\nenvironments = ["{" and ".join([*where[:-1], f"({there})"])}"]\n'
    for name, needs in hub.sources.items():
        text += f'[[tool.uv.dependency-metadata]]\nname = "{name}"\nrequires-dist = {list(needs)}\n'
    return text, where


def resolve(uv: Path, source: Path, hub: Hub, held: dict[str, str], before: str) -> dict[str, str]:
    """Return lock entries with all hashes, except those `held`; without comments and registries' names.

    Entries of `held` override what packages need: one may pin a build (torch==2.13.0+cpu) that no index lists. Versions
    in the lock `before` stay where they still fit.
    """
    plain = ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"]
    alone = ["--no-deps"] if hub.data_only else []
    settings, where = project(hub)
    with tempfile.TemporaryDirectory() as folder:
        wishes, pins, lock = Path(folder, "pyproject.toml"), Path(folder, "pins.txt"), Path(folder, "lock.txt")
        wishes.write_text(settings)
        lock.write_text(before)
        never = "".join(f"{name}; sys_platform == 'never'\n" for name in hub.without)
        pins.write_text("".join(entry.split()[0] + "\n" for entry in held.values()) + never)
        rule = "--override" if hub.shared or hub.without else "--constraint"
        forks = ["--universal", "--fork-strategy", "fewest", "--python-version", hub.pythons[0]]
        target = [*forks, rule, str(pins), str(source.absolute()), "-o", str(lock)]
        done = subprocess.run(
            [str(uv.absolute()), "pip", "compile", "-q", *plain, *alone, *target],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{source.name} cannot be resolved:\n{done.stderr}")
        entries = lock_entries(lock)
    return {name: shortened(text, where) for name, text in entries.items() if name not in held}


def check_wheels(uv: Path, lock: Path, hub: Hub) -> None:
    """Check that each Python of the hub has a wheel of each locked package on today's Linux; exit where it has none."""
    for version, machine in itertools.product(hub.pythons, [hub.machine] if hub.machine else MACHINES):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            entries = lock_entries(lock)
            file.write("".join(text for name, text in entries.items() if name not in hub.sources))
            file.flush()
            target = ["--python-version", version, "--python-platform", f"{machine}-manylinux_2_35"]
            plain = ["--no-deps", "--only-binary", ":all:", "--no-config", "--no-header"]
            command = [str(uv), "pip", "compile", "-q", *target, *plain, file.name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{lock.name} does not install on Python {version}, {machine}:\n{done.stderr}")


def hashes(entry: str) -> list[str]:
    """Return the sha256 sums of a lock entry."""
    return re.findall(r"sha256:([0-9a-f]{64})", entry)


def preferred_build(pip: list[str], pinned: str) -> str:
    """Return the sha256 of the wheel that this machine's pip chooses by itself."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, pinned], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()


def with_local_builds(entry: str, before: str, preferred: str) -> str:
    """Return a lock entry that also lists the builds accepted before and the one preferred here."""
    pinned = entry.split()[0]
    accepted = hashes(before) if before.split()[:1] == [pinned] else []
    every = list(dict.fromkeys([*hashes(entry), *accepted, preferred]))
    return pinned + "".join(f" \\\n    --hash=sha256:{digest}" for digest in every) + "\n"


def write_lock(path: Path, hub: Hub, entries: dict[str, str], pip: list[str]) -> None:
    """Write one lock file."""
    if not hub.cuda:
        entries = {name: text for name, text in entries.items() if not CUDA_ONLY.match(name)}
    if not hub.cuda and "torch" in entries:
        before = lock_entries(path).get("torch", "") if path.exists() else ""
        pinned = entries["torch"].split()[0]
        entries["torch"] = with_local_builds(entries["torch"], before, preferred_build(pip, pinned))
    versions = ", ".join(hub.pythons)
    made = f"# Made by `./bazelw run //build:lock` from build/{hub.source}, for Python {versions}.\n"
    path.write_text(made + "".join(entries.values()))
    print(f"build/locks/{path.name}: {len(entries)} packages")


def main(words: list[str]) -> None:
    """Make the named locks, or all."""
    names = [word for word in words if word != "--upgrade"]
    unknown = sorted(set(names) - HUBS.keys())
    if unknown:
        sys.exit(f"no lock is called {', '.join(unknown)}; there are {', '.join(HUBS)}")
    build = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path.cwd())) / "build"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip, uv = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"], Path(folder, "bin/uv")
        subprocess.run([*pip, "install", "-q", UV], check=True)
        for name in names or HUBS:
            hub, path = HUBS[name], build / "locks" / f"{name}.txt"
            shared = lock_entries(build / "locks" / f"{hub.over}.txt") if hub.over else {}
            if hub.shared:
                shared = {package: shared[package] for package in hub.shared}
            before = path.read_text() if path.exists() and "--upgrade" not in words else ""
            entries = resolve(uv, build / hub.source, hub, shared, before)
            write_lock(path, hub, entries, pip)
            check_wheels(uv, path, hub)


if __name__ == "__main__":
    main(sys.argv[1:])
