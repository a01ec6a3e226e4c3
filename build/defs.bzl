"""The macros of Tessera's BUILD files: one target a file, and a target sees only what it declares."""

load("@rules_python//python:defs.bzl", "py_binary", "py_library", "py_test")
load(":dist.bzl", "distribution")

def requirement(name, hub = "pypi"):
    """The py_library of a third-party package and what it needs.

    Args:
      name: of the distribution, as in build/requirements.in.
      hub: the repository of repositories.bzl that holds it.

    Returns:
      a label.
    """
    package = name.lower().replace("-", "_").replace(".", "_")
    return "@%s//%s" % (hub, package)

def _library_name():
    """libs/seqpack -> seqpack; the last part of the package's path."""
    return native.package_name().split("/")[-1]

def _source(name):
    return "%s/%s.py" % (_library_name(), name)

def _package_files(source):
    """The `__init__.py` of each package that a source lies in: libs/seqpack's planning/pack.py is in two."""
    folders = source.split("/")[:-1]
    return ["/".join(folders[:depth] + ["__init__.py"]) for depth in range(1, len(folders) + 1)]

def module(name, srcs = None, deps = [], kernels = [], data = [], visibility = None, tags = [], **attrs):
    """One Python file of a library, importable by its full name.

    The `__init__.py` of its packages (lazy, or nothing but words) are always there; the modules that the file imports are `deps`.

    Args:
      name: of the target; the file is NAME/name.py unless `srcs` says otherwise.
      srcs: the one file, where the name does not say it.
      deps: what the file imports.
      kernels: distributions of @pypi_kernels that it imports on CUDA devices, and has with --config=cuda alone.
      data: files it reads.
      visibility: everybody, unless said otherwise.
      tags: as in Bazel.
      **attrs: as in py_library.
    """
    srcs = srcs or [_source(name)]
    if kernels:
        deps = deps + select({
            "//build:cuda": [requirement(kernel, "pypi_kernels") for kernel in kernels],
            "//conditions:default": [],
        })
    py_library(
        name = name,
        srcs = srcs + [path for path in _package_files(srcs[0]) if path not in srcs],
        data = data,
        imports = ["."],
        tags = tags,
        visibility = visibility or ["//visibility:public"],
        deps = deps,
        **attrs
    )

def library(name, deps = [], visibility = ["//visibility:public"], **attrs):
    """The library as others depend on it: its facade and all that the facade can hand out.

    Args:
      name: of the target, that of the folder, so that `//libs/NAME` names it.
      deps: the modules.
      visibility: everybody, unless said otherwise.
      **attrs: as in py_library.
    """
    py_library(
        name = name,
        srcs = [_library_name() + "/__init__.py"],
        data = native.glob([_library_name() + "/py.typed"]),
        imports = ["."],
        visibility = visibility,
        deps = deps,
        **attrs
    )

    # Benchmarks are run by hand, some of them on machines without Bazel; here they are known and seen by the linters.
    benchmarks = native.glob(["benchmarks/*.py"])
    if benchmarks:
        py_library(
            name = name + "_benchmarks",
            srcs = benchmarks,
            visibility = ["//visibility:private"],
            deps = [":" + name],
        )

    # What `pip install ./libs/NAME` reads, less the tests; the wheel and the sdist are made of it.
    native.filegroup(
        name = name + "_tree",
        srcs = native.glob(
            ["pyproject.toml", "README.md", _library_name() + "/**"],
            exclude = ["**/*_test.py", "**/__pycache__/**"],
        ),
        visibility = visibility,
    )
    for kind in ["sdist", "wheel"]:
        distribution(
            name = kind,
            srcs = [":%s_tree" % name, "//:LICENSE"],
            kind = kind,
            visibility = visibility,
        )

# Tags that say what a test needs; .bazelrc decides which of them run.
_NEEDS = ["gpu", "gpu2", "gpu4", "npu", "vllm", "slow", "browser"]

def module_test(name, srcs = None, deps = [], data = [], size = "small", tags = [], env = {}, args = [], hub = "pypi", **attrs):
    """A pytest file. pytest, and nothing else, is added to what it declares.

    Args:
      name: of the target; the file is NAME/name.py unless `srcs` says otherwise.
      srcs: the one file, where it is elsewhere.
      deps: what the file imports.
      data: files it reads.
      size: small (1 minute), medium (5) or large (15).
      tags: what it needs: gpu, gpu2, gpu4, npu, vllm, slow, browser.
      env: environment variables.
      args: further words for pytest.
      hub: the repository that pytest comes from, for tests of another hub.
      **attrs: as in py_test.
    """
    srcs = srcs or [_source(name)]
    if len(srcs) != 1:
        fail("module_test %s: one test file a target, got %s" % (name, srcs))
    needs = [tag for tag in tags if tag in _NEEDS]
    py_test(
        name = name,
        srcs = srcs + ["//build:pytest_main.py"],
        args = ["$(rootpath %s)" % srcs[0]] + ["--tessera-tag=" + tag for tag in needs] + args,
        data = data + ["//build:allowed_skips.txt", "//:pyproject.toml"],
        env = env,
        imports = ["."],
        main = "//build:pytest_main.py",
        size = size,
        tags = tags,
        deps = deps + [requirement("pytest", hub)],
        **attrs
    )

def app(name, main, deps = [], srcs = None, data = [], hub = "pypi", visibility = ["//visibility:public"], **attrs):
    """A program for `bazel run`. Relative paths in its flags are the user's if it asks $BUILD_WORKING_DIRECTORY.

    Args:
      name: of the target.
      main: the file that is run.
      deps: what it imports.
      srcs: the file and others beside it; `main` alone by default.
      data: files it reads.
      hub: the repository that its packages come from; //build:gazelle reads it.
      visibility: everybody, unless said otherwise.
      **attrs: as in py_binary.
    """
    if hub != "pypi" and not [dep for dep in deps if dep.startswith("@%s//" % hub)]:
        fail("app %s: no dependency is of its hub @%s" % (name, hub))
    py_binary(
        name = name,
        srcs = srcs or [main],
        data = data,
        main = main,
        visibility = visibility,
        deps = deps,
        **attrs
    )
