"""User code by name: `FILE.py:NAME` or `package.module:name`."""

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

IMPORTED: dict[str, str] = {}
"""Files imported here, by the name of their module: another process imports them before it unpickles."""


def is_user_code(name: object) -> bool:
    """Return whether a name is a spec, `FILE.py:NAME` or `package.module:name`, and no registered name."""
    return isinstance(name, str) and ":" in name


def load_object(spec: str, kind: str, of: type | tuple[type, ...] | None = None) -> Any:
    """Load the object that `spec` names; errors call it by its `kind` ("reward", "environment").

    A file is imported once, however often it is named, under a module name of its own, and can import its neighbours:
    its folder is put at the end of `sys.path`. NAME may be dotted (`Class.attribute`).

    Raises:
        ValueError: the spec has another shape, there is no such file, module or name, or the object is not `of` that
            type; the text says what to write. Or importing it raised: the text has the file, the line and the error.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        example = kind.rpartition(".")[2].replace("-", "_")
        raise ValueError(
            f"--{kind} {spec!r} is not FILE.py:NAME or package.module:name, such as my_{example}.py:{example}"
        )
    module = _file(place, kind) if place.endswith(".py") else _module(place, kind)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise ValueError(f"{place} has no {part!r} for --{kind}{_hint(part, value)}")
        value = getattr(value, part)
    if of is not None and not isinstance(value, of):
        names = " or ".join(t.__name__ for t in (of if isinstance(of, tuple) else (of,)))
        raise ValueError(f"--{kind} {spec} is a {type(value).__name__}; a {names} is needed")
    return value


def absolute_spec(spec: str) -> str:
    """Return the spec with the whole path of its file, which other directories and processes find too."""
    place, _, name = spec.rpartition(":")
    return f"{Path(place).expanduser().resolve()}:{name}" if place.endswith(".py") else spec


def file_of(spec: str) -> Path | None:
    """Return the file that a spec which was loaded is in; None where a package has none."""
    place = spec.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser().resolve()
    file = getattr(sys.modules.get(place), "__file__", None)
    return None if file is None else Path(file)


def file_hash(spec: str) -> str | None:
    """Return the SHA-256 of the file that a spec is in; None where it has none. Its neighbours are not part of it."""
    path = file_of(spec)
    if path is None:
        return None
    module = sys.modules.get(spec.rpartition(":")[0])  # it may be in a zip file: a wheel on the path
    loader: Any = getattr(module, "__loader__", None)
    content: bytes = loader.get_data(str(path)) if hasattr(loader, "get_data") else path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def _file(place: str, kind: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise ValueError(f"there is no file {path} for --{kind}: give its path from {Path.cwd()}, or all of it")
    name = f"{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"  # two files, two modules
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # never None for a path that ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # as `import` does: the next attempt begins anew
        if isinstance(error, Exception):
            raise ValueError(f"--{kind}: {describe_error(error, path)}") from error
        raise
    IMPORTED[name] = str(path)
    return module


def _module(place: str, kind: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if place != missing and not place.startswith(missing + "."):  # the module is there, and lacks something itself
            raise ValueError(f"--{kind}: {describe_error(error)}") from error
        raise ValueError(
            f"there is no module {missing!r} for --{kind}: install its package, put its folder on PYTHONPATH, "
            f"or name the file, FILE.py:NAME"
        ) from error
    except Exception as error:
        raise ValueError(f"--{kind}: {describe_error(error)}") from error


def describe_error(error: Exception, path: Path | None = None) -> str:
    """Return where an error of user code came from, its file and line, and what it says.

    `path`: the user's file, whose last line on the way to the error is named.
    """
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    all_frames = [*traceback.extract_tb(error.__traceback__)]
    frames = [frame for frame in all_frames if not frame.filename.startswith("<frozen")] or all_frames
    of_file = [frame for frame in frames if path is not None and frame.filename == str(path)] or frames
    return f"{of_file[-1].filename}, line {of_file[-1].lineno}: {type(error).__name__}: {error}"


def _hint(name: str, owner: Any) -> str:
    public = [other for other in vars(owner) if not other.startswith("_")] if hasattr(owner, "__dict__") else []
    close = difflib.get_close_matches(name, public, n=3)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    own = [n for n in public if getattr(getattr(owner, n), "__module__", None) == getattr(owner, "__name__", "")]
    return f"; it has {', '.join(own[:10])}" if own else ""
