"""A Python interpreter with no packages of its own, found on the machine and registered as the toolchain."""

_BUILD = """load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

exports_files(["venv/bin/python3"])

py_runtime(
    name = "runtime",
    interpreter_path = "{interpreter}",
    python_version = "PY3",
    stub_shebang = "#!{interpreter}",
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

_PROBE = """
import os, sys
print("%d.%d" % sys.version_info[:2])
print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))
"""

def _candidates(ctx, version):
    chosen = ctx.os.environ.get("TESSERA_PYTHON")
    if chosen:
        return [chosen]
    found = [ctx.which(name) for name in ["python" + version, "python3", "python"]]
    return [str(path) for path in found if path] + ["/usr/bin/python" + version, "/usr/local/bin/python" + version]

def _find(ctx):
    version = ctx.attr.version
    seen = []
    for candidate in _candidates(ctx, version):
        probe = ctx.execute([candidate, "-I", "-c", _PROBE])
        if probe.return_code != 0:
            seen.append(candidate + " does not run")
            continue
        found, executable = probe.stdout.strip().split("\n")
        if found == version:
            return executable
        seen.append("%s is Python %s" % (candidate, found))
    fail(("Tessera needs Python {v}, and found none: {seen}. Fix: install it (Debian: `apt-get install python{v} " +
          "python{v}-venv python3-pip`) or name it: `export TESSERA_PYTHON=/path/to/python{v}`.").format(
        seen = "; ".join(seen),
        v = version,
    ))

def _python_interpreter_impl(ctx):
    base = _find(ctx)
    made = ctx.execute([base, "-I", "-m", "venv", "--without-pip", "venv"], timeout = 120)
    if made.return_code != 0:
        fail("%s cannot make a virtual environment: %s%s. Fix (Debian): apt-get install python%s-venv" %
             (base, made.stdout, made.stderr, ctx.attr.version))
    ctx.file("base.txt", base)
    ctx.file("BUILD.bazel", _BUILD.format(interpreter = ctx.path("venv/bin/python3")))

python_interpreter = repository_rule(
    implementation = _python_interpreter_impl,
    attrs = {"version": attr.string(mandatory = True)},
    doc = "Finds Python `version` ($TESSERA_PYTHON, pythonX.Y, python3, python) and makes an empty virtual environment of it.",
    environ = ["TESSERA_PYTHON"],
)
