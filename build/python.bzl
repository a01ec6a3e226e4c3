"""A Python interpreter with no packages of its own, found on the machine and registered as the toolchain.

The interpreter is a file of this repository, so that what is built names no folder of the clone it was built in: two
clones on machines with the same Python share a cache.
"""

_BUILD = """load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["venv/bin/python3"])

py_runtime(
    name = "runtime",
    files = ["venv/pyvenv.cfg"],
    interpreter = "venv/bin/python3",
    python_version = "PY3",
    stub_shebang = "#!{base}",
)

py_runtime_pair(
    name = "pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

# Beside a link to the interpreter, all that makes an environment: it has no packages, not the machine's either.
_PYVENV = """home = {home}
include-system-site-packages = false
version = {version}
"""

_PROBE = """
import os, sys
print("%d.%d" % sys.version_info[:2])
print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
"""

def _is_path(chosen):
    return "/" in chosen

def _candidates(ctx):
    """(Commands to try, the versions that are wanted): $TESSERA_PYTHON is a path or one of the versions."""
    chosen = ctx.os.environ.get("TESSERA_PYTHON", "")
    if _is_path(chosen):
        return [chosen], ctx.attr.versions
    if chosen and chosen not in ctx.attr.versions:
        fail("TESSERA_PYTHON=%s is neither a path nor one of %s" % (chosen, ", ".join(ctx.attr.versions)))
    wanted = [chosen] if chosen else ctx.attr.versions
    found = [ctx.which(name) for name in ["python" + version for version in wanted] + ["python3", "python"]]
    known = [folder + "/bin/python" + version for version in wanted for folder in ["/usr", "/usr/local"]]
    return [str(path) for path in found if path] + known, wanted

def _find(ctx):
    """(The interpreter's path, its version.)"""
    candidates, wanted = _candidates(ctx)
    seen = []
    for candidate in candidates:
        probe = ctx.execute([candidate, "-I", "-c", _PROBE])
        if probe.return_code != 0:
            seen.append(candidate + " does not run")
            continue
        found, executable = probe.stdout.strip().split("\n")
        if found in wanted:
            return executable, found
        seen.append("%s is Python %s" % (candidate, found))
    fail(("Tessera needs Python {v}, and found none: {seen}. Fix: install one with pip and venv (Debian: " +
          "`apt-get install python3 python3-venv python3-pip`) or name it: `export TESSERA_PYTHON=/path/to/python`.").format(
        seen = "; ".join(seen),
        v = " or ".join(wanted),
    ))

def _python_interpreter_impl(ctx):
    base, version = _find(ctx)
    ctx.symlink(base, "venv/bin/python3")
    ctx.file("venv/pyvenv.cfg", _PYVENV.format(home = base.rpartition("/")[0], version = version), executable = False)
    ctx.file("base.txt", base)
    ctx.file("BUILD.bazel", _BUILD.format(base = base))

python_interpreter = repository_rule(
    implementation = _python_interpreter_impl,
    attrs = {"versions": attr.string_list(mandatory = True)},
    doc = "Finds a Python of `versions`, the first first ($TESSERA_PYTHON names one, or its path), and makes an empty environment.",
    environ = ["TESSERA_PYTHON"],
)
