"""The confined part of a run: execute a program as a notebook's cell, or evaluate expressions after it."""

import ast
import atexit
import contextlib
import importlib
import itertools
import json
import linecache
import os
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from rollout.tools.sandbox import namespaces

# Imported before the server is confined: fast, and their shared libraries are then visible inside.
MODULES = (
    "array", "asyncio", "base64", "binascii", "bisect", "bz2", "calendar", "cmath", "collections", "copy", "csv",
    "ctypes", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "hashlib", "heapq",
    "hmac", "html", "io", "itertools", "json", "linecache", "lzma", "math", "operator", "pprint", "queue", "random",
    "re", "secrets", "sqlite3", "statistics", "string", "struct", "subprocess", "textwrap", "threading", "time",
    "traceback", "types", "typing", "unicodedata", "uuid", "zlib", "zoneinfo", "_socket", "_ssl",
)  # fmt: skip
ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}


def preload_modules() -> None:
    """Import the modules that a run is likely to need, skipping those that this Python was built without."""
    sys.executable = os.path.realpath(sys.executable)  # the path inside
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def execute(request: dict[str, Any], result: int) -> NoReturn:
    """Execute `request["code"]`, then evaluate `request["expressions"]` in order and write their values as the result.

    The value of a last line that is an expression is shown, as a notebook shows it. Never returns: the process ends
    with the program's exit status, 1 after an exception.
    """
    main = _prepare(request["packages"])
    status = 1
    try:
        space = _execute(request["code"], "program.py", main)
        for expression in request["expressions"]:
            value = eval(compile(expression, "test.py", "eval"), space)  # confined: this is what the sandbox is for
            os.write(result, json.dumps(encoded(value)).encode() + b"\n")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if status and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  the program's own, shown to whoever wrote it
        _show(error)
    finally:
        with contextlib.suppress(BaseException):
            _wait_for_threads()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        os._exit(status & 0xFF)


def execute_cells(packages: list[str], cells: int, result: int) -> NoReturn:
    """Execute one cell after the other, in one module; write a line as the result after each.

    Eight bytes with its size stand before a cell. What a cell raises is shown, SystemExit too, and ends that cell.
    Never returns: the process ends where no more cells come.
    """
    main = _prepare(packages)
    os.environ["PATH"] = namespaces.PATH
    for descriptor in (cells, result):
        os.set_inheritable(descriptor, False)
    with open(cells, "rb", closefd=False) as file:
        for number in itertools.count(1):
            code = file.read(int.from_bytes(file.read(8))).decode("utf-8", "backslashreplace")
            if not code:
                os._exit(0)
            try:
                _execute(code, f"cell-{number}.py", main)
            except BaseException as error:  # noqa: BLE001  the program's own, shown to whoever wrote it
                _show(error)
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(BaseException):
                    stream.flush()
            os.write(result, b"\n")
    os._exit(0)


def _prepare(packages: list[str]) -> types.ModuleType:
    """Leave the server's modules and variables behind; return the module in which a program runs."""
    sys.path[:] = [p for p in sys.path if p.startswith(sys.base_prefix)] + packages
    for name in [n for n in sys.modules if n == "rollout" or n.startswith("rollout.")]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=os.getcwd(), TMPDIR=os.getcwd())
    sys.argv = ["program.py"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    return main


def _execute(code: str, name: str, main: types.ModuleType) -> dict[str, Any]:
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), main.__dict__)  # confined: this is what the sandbox is for
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), main.__dict__)
        if value is not None:
            print(repr(value))
    return main.__dict__


def _wait_for_threads() -> None:
    """Wait for threads and run exit functions, as an interpreter does at its end."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()


def _show(error: BaseException) -> None:
    """Print the traceback, without the frames of this file."""
    report = traceback.TracebackException.from_exception(error, limit=-20)
    report.stack[:] = [frame for frame in report.stack if frame.filename != __file__]
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.write("".join(report.format()))


def encoded(value: Any) -> Any:
    """Encode a value as JSON that keeps Python's distinctions: floats by their digits, sets, keys that are not text.

    A tuple is a list, as in tests that came from JSON. Objects of other classes are named, and equal nothing.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": repr(float(value))}
    if isinstance(value, list | tuple):
        return [encoded(v) for v in value]
    if isinstance(value, dict):
        return {"dict": sorted(([encoded(k), encoded(v)] for k, v in value.items()), key=json.dumps)}
    if isinstance(value, set | frozenset):
        return {"set": sorted((encoded(v) for v in value), key=json.dumps)}
    return {"object": type(value).__name__}
