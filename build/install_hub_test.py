"""What a hub installs is the same bytes wherever it lies: nothing in it names the folder of its installation."""

import hashlib
import marshal
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import install_hub
import lock
import pip as pip_package
import pytest
from hypothesis.internal.constants_ast import is_local_module_file

FILES = {
    "tiny/__init__.py": "def where():\n    raise ValueError('here')\n",
    "tiny-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
    "tiny-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: us\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny-1.0.dist-info/entry_points.txt": "[console_scripts]\ntiny = tiny:where\n",
    "tiny-1.0.data/scripts/shell": "#!/bin/sh\necho tiny\n",
}


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The words that run pip."""
    monkeypatch.setenv("PYTHONPATH", str(Path(pip_package.__file__).parents[1]))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return [sys.executable, "-m", "pip"]


def build_of_tiny(folder: Path, version: str = "1.0") -> Path:
    """A wheel of this version."""
    folder.mkdir(parents=True)
    path = folder / f"tiny-{version}-py3-none-any.whl"
    files = {
        name.replace("1.0", version): text.replace("\nVersion: 1.0", f"\nVersion: {version}")
        for name, text in FILES.items()
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(name, text)
        record = f"tiny-{version}.dist-info/RECORD"
        wheel.writestr(record, "".join(f"{name},,\n" for name in [*files, record]))
    return path


def hub(target: Path, pip: list[str]) -> dict[str, bytes]:
    """Install a wheel as a hub does; every file's bytes by its path."""
    build_of_tiny(target / "wheels")
    assert install_hub.install(pip, target) == ["tiny"]
    site = target / "tiny/site-packages"
    return {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*") if path.is_file()}


def test_two_places_have_the_same_bytes(tmp_path: Path, pip: list[str]) -> None:
    first, second = hub(tmp_path / "first", pip), hub(tmp_path / "another/second", pip)
    assert first == second
    assert not [name for name, data in first.items() if str(tmp_path).encode() in data]
    assert {"bin/tiny", "bin/shell", "tiny/__init__.py"} <= first.keys()
    assert first["bin/shell"] == FILES["tiny-1.0.data/scripts/shell"].encode()
    assert first["bin/tiny"].startswith(b"#!/usr/bin/env python3\n")
    record = first["tiny-1.0.dist-info/RECORD"].decode()
    assert "direct_url" not in record
    assert "tiny-1.0.dist-info/direct_url.json" not in first


def test_byte_code_names_its_source_from_the_hub_on_and_tracebacks_the_real_file(
    tmp_path: Path, pip: list[str]
) -> None:
    files = hub(tmp_path, pip)
    (cached,) = [data for name, data in files.items() if name.endswith(".pyc")]
    assert marshal.loads(cached[16:]).co_filename == "tiny/site-packages/tiny/__init__.py"
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'tiny/site-packages')!r}); import tiny; tiny.where()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert f'File "{tmp_path}/tiny/site-packages/tiny/__init__.py", line 2' in done.stderr


def test_a_hubs_packages_are_other_peoples_code(tmp_path: Path, pip: list[str]) -> None:
    """Hypothesis would parse the source of all that a test imports, torch's 2,000 files among it."""
    hub(tmp_path, pip)
    (theirs,) = tmp_path.glob("tiny/*/tiny/__init__.py")
    assert is_local_module_file(install_hub.__file__)
    assert not is_local_module_file(str(theirs))


def test_a_locks_own_build_is_taken_where_pip_prefers_another(
    tmp_path: Path, pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a lock for CUDA it is the registry's torch, whatever +cpu build lies here; of one that lists that, it."""
    registry, local = build_of_tiny(tmp_path / "index/tiny"), build_of_tiny(tmp_path / "local", "1.0+cpu")
    digests = {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in [registry, local]}
    page = f'<a href="{registry.name}#sha256={digests[registry]}">{registry.name}</a>'
    (registry.parent / "index.html").write_text(page)
    monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path / 'index'}")
    monkeypatch.setenv("PIP_FIND_LINKS", str(local.parent))
    entry = f"tiny==1.0 \\\n    --hash=sha256:{digests[registry]}\n"
    for name in ["cuda", "cpu", "refused"]:
        (tmp_path / name / "wheels").mkdir(parents=True)
    install_hub.download(pip, {"tiny": entry}, tmp_path / "cuda")
    both = f"{entry[:-1]} \\\n    --hash=sha256:{digests[local]}\n"
    install_hub.download_local_build(pip, both, tmp_path / "cpu")
    assert [path.name for path in tmp_path.glob("cuda/wheels/*")] == [registry.name]
    assert [path.name for path in tmp_path.glob("cpu/wheels/*")] == [local.name]
    with pytest.raises(SystemExit, match="which the lock does not list"):
        install_hub.download_local_build(pip, entry, tmp_path / "refused")


def test_a_source_distribution_is_unpacked_by_its_hash_and_not_built(
    tmp_path: Path, pip: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"setup.py": "import absent", "PKG-INFO": "Name: tiny\nVersion: 1.0\n", "a.jinja": "{{ messages }}"}
    for name, text in files.items():
        (tmp_path / "tiny-1.0" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "tiny-1.0" / name).write_text(text)
    with tarfile.open(tmp_path / "tiny-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "tiny-1.0", "tiny-1.0")
    digest = hashlib.sha256((tmp_path / "tiny-1.0.tar.gz").read_bytes()).hexdigest()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for name in ["hub", "refused"]:
        (tmp_path / name).mkdir()
    install_hub.unpack_source(pip, "tiny", f"tiny==1.0 --hash=sha256:{digest}\n", tmp_path / "hub")
    tree = tmp_path / "hub/tiny/site-packages/tiny-sources"
    assert (tree / "a.jinja").read_text() == "{{ messages }}"
    with pytest.raises(SystemExit, match="could not unpack the source distribution of tiny"):
        install_hub.unpack_source(pip, "tiny", f"tiny==1.0 --hash=sha256:{'0' * 64}\n", tmp_path / "refused")


FORKED = """# Made by a tool.
numpy==2.3.5 ; python_full_version < '3.13' \\
    --hash=sha256:aa
numpy==2.4.6 ; python_full_version == '3.13.*' \\
    --hash=sha256:bb
rich==15.0.0 \\
    --hash=sha256:cc
"""
LOCKS = Path(__file__).parent / "locks"


def pins(name: str) -> dict[str, list[str]]:
    """Each distribution's versions in a lock."""
    entries = install_hub.lock_entries(LOCKS / f"{name}.txt")
    return {name: re.findall(r"^[^\s=]+==([^\s;]+)", text, re.M) for name, text in entries.items()}


def test_a_lock_may_differ_by_python_and_pip_takes_the_pin_of_its_own(tmp_path: Path, pip: list[str]) -> None:
    path = tmp_path / "lock.txt"
    path.write_text(FORKED)
    entries = install_hub.lock_entries(path)
    assert "".join(entries.values()) == FORKED.split("\n", 1)[1]
    assert entries["numpy"].count("numpy==") == 2
    path.write_text("tiny==1.0 ; python_full_version < '3'\ntiny==2.0 ; python_full_version >= '3'\n")
    done = subprocess.run(
        [*pip, "install", "--no-index", "--dry-run", "-r", str(path)], capture_output=True, text=True, check=False
    )
    assert "tiny==2.0" in done.stderr
    assert "tiny==1.0" not in done.stderr


WHERE = ("sys_platform == 'linux'", "python_full_version < '3.14'")


@pytest.mark.parametrize(
    ("marker", "short"),
    [
        ("", ""),
        (" ; sys_platform == 'linux'", ""),
        (" ; python_full_version < '3.14' and sys_platform == 'linux'", ""),
        (" ; python_full_version >= '3.12' and sys_platform == 'linux'", " ; python_full_version >= '3.12'"),
        (
            " ; (extra == 'a' and sys_platform == 'linux') or (extra == 'b' and sys_platform == 'linux')",
            " ; extra == 'a' or extra == 'b'",
        ),
        (" ; python_full_version < '3.12'", " ; python_full_version < '3.12'"),
    ],
)
def test_markers_say_what_the_lock_does_not(marker: str, short: str) -> None:
    entry = "tiny==1.0{} \\\n    --hash=sha256:aa\n"
    assert lock.shortened(entry.format(marker), WHERE) == entry.format(short)


def test_what_recipes_install_is_what_the_tests_ran_with() -> None:
    """The locks of recipes pin what decides numbers as the tests' own does; vLLM and trainer share one transformers."""
    cpu, oldest = pins("cpu"), pins("tf517")
    for name in ["recipes_cuda", "recipes_npu"]:
        found = pins(name)
        for package in ["torch", "tensordict", "ray", "megatron-core", "safetensors"]:
            assert found[package] == cpu[package], (name, package)
    cuda = pins("recipes_cuda")
    assert {"vllm", "flash-linear-attention", "causal-conv1d", "peft", "triton"} <= cuda.keys()
    ((shared,), (first,), (last,)) = cuda["transformers"], oldest["transformers"], cpu["transformers"]

    def release(version: str) -> tuple[int, ...]:
        return tuple(map(int, version.split(".")))

    assert release(first) <= release(shared) < min((5, 20), release(last))
    assert pins("recipes_npu")["torch-npu"] == cpu["torch"]


def test_the_sampler_on_npus_is_the_one_that_it_is_adapted_for() -> None:
    """vllm-ascend pins torch and torch-npu; vLLM beside it is of the same release, and triton is its makers' own."""
    found = pins("vllm_npu")
    assert found["vllm"] == ["0.23.0"]
    assert found["vllm-ascend"] == ["0.23.0.post1"]
    assert found["torch-npu"][0].startswith(found["torch"][0])
    assert not {"triton", "triton-ascend"} & found.keys()
