"""The names of tool-call parsers in the newest vLLM and SGLang, beside those that `known_formats.servers` lists.

    PYTHONPATH=libs/chat_tools python libs/chat_tools/benchmarks/server_names.py CACHE

Fetches vLLM's source distribution and SGLang's wheel with pip into CACHE (delete it to fetch newer ones); nothing of
them is installed or run, their sources are read. Ends with 1 where a name is missing here, or there.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from chat_tools.known_formats.servers import NAMES, VERSIONS

SOURCES = {
    "vllm": ("vllm/tool_parsers/__init__.py", "_TOOL_PARSERS_TO_REGISTER", ("--no-binary", ":all:")),
    "sglang": ("sglang/srt/function_call/function_call_parser.py", "ToolCallParserEnum", ("--only-binary", ":all:")),
}


def fetched(package: str, kind: tuple[str, ...], cache: Path) -> tuple[str, Path]:
    """Return the version and the archive of a package, fetched where the cache has none."""
    found = next(_archives(package, cache), None)
    if found is None:
        unpacked = cache / "unpacked"
        unpacked.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-clean", *kind, "-d", str(cache), package]
        subprocess.run(command, env={**os.environ, "TMPDIR": str(unpacked.resolve())}, check=False)
        found = next(_archives(package, cache), None)
    if found is None:
        raise SystemExit(f"pip fetched no archive of {package} into {cache}: see what it printed")
    return found.name.removeprefix(f"{package}-").removesuffix(".tar.gz").split("-")[0], found


def _archives(package: str, cache: Path) -> Iterator[Path]:
    yield from sorted(path for end in (".tar.gz", ".whl") for path in cache.rglob(f"{package}-*{end}"))


def source_of(archive: Path, path: str) -> str:
    """Return the text of a file in an archive."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(path).decode()
    with tarfile.open(archive) as tar:
        member = next(m for m in tar if m.name.partition("/")[2] == path)
        opened = tar.extractfile(member)
        assert opened is not None, f"{path} is no file"
        return opened.read().decode()


def keys_of(source: str, name: str) -> set[str]:
    """Return the keys of the dict that a module or class gives this name."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, ast.Dict):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    raise SystemExit(f"no dict {name} in the source: the registry has moved")


def main() -> int:
    """Print what differs by server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cache", type=Path)
    cache = parser.parse_args().cache
    differ = False
    for server, (path, name, kind) in SOURCES.items():
        version, archive = fetched(server, kind, cache)
        there, here = keys_of(source_of(archive, path), name), set(NAMES[server])
        print(f"{server} {version} (listed: {VERSIONS[server]}): {len(there)} names")
        print(f"  not listed: {sorted(there - here)}; listed, not there: {sorted(here - there)}")
        differ |= there != here
    return int(differ)


if __name__ == "__main__":
    raise SystemExit(main())
