"""The macros of Tessera's BUILD files: one target a folder, and a target sees only what it declares."""

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

def _is_app():
    return native.package_name().startswith("apps/")

def _root():
    """Where the Python files are: libs/seqpack has them in seqpack/, an app beside its BUILD file."""
    return "" if _is_app() else _library_name() + "/"

def _folder(name):
    """The path of a folder by its name; the top one has the name of the library or app."""
    return _root() + ("" if name == _library_name() else name + "/")

def _package_files(srcs):
    """The `__init__.py` of each package that the sources lie in: libs/seqpack's planning/pack.py is in two."""
    files = {}
    for source in [source for source in srcs if not source.startswith("//")]:
        folders = source.split("/")[:-1]
        for depth in range(0 if _is_app() else 1, len(folders) + 1):
            files["/".join(folders[:depth] + ["__init__.py"])] = True
    return native.glob(files.keys())

def _python(rule, srcs, deps, **attrs):
    """A target of files that are imported by their full names, an app's from the top of the repository.

    The `__init__.py` of their packages (lazy, or nothing but words) are always there.
    """
    rule(
        srcs = srcs + [path for path in _package_files(srcs) if path not in srcs],
        imports = [] if _is_app() else ["."],
        deps = deps + (["//apps:init"] if _is_app() else []),
        **attrs
    )

def _modules(srcs, deps, kernels, visibility, **attrs):
    if kernels:
        deps = deps + select({
            "//build:cuda": [requirement(kernel, "pypi_kernels") for kernel in kernels],
            "//conditions:default": [],
        })
    _python(py_library, srcs, deps, visibility = visibility or ["//visibility:public"], **attrs)

def python_package(name, exclude = [], deps = [], kernels = [], visibility = None, **attrs):
    """The modules of one folder of a library or an app, without the folders in it.

    Args:
      name: of the target, the folder's: its path from the top folder.
      exclude: files that have targets of their own (`module`).
      deps: what the files import.
      kernels: distributions of @pypi_kernels that they import on CUDA devices, and have with --config=cuda alone.
      visibility: everybody, unless said otherwise.
      **attrs: as in py_library.
    """
    folder = _folder(name)
    srcs = native.glob([folder + "*.py"], exclude = [folder + file for file in ["*_test.py"] + exclude])
    _modules(srcs, deps, kernels, visibility, name = name, **attrs)

def module(name, srcs = None, deps = [], kernels = [], visibility = None, **attrs):
    """One Python file: of the top folder, or one whose packages are not for all that its folder is for.

    Args:
      name: of the target; the file is that of this path from the top folder unless `srcs` says otherwise.
      srcs: the one file, where the name does not say it.
      deps: what the file imports.
      kernels: as in `python_package`.
      visibility: everybody, unless said otherwise.
      **attrs: as in py_library.
    """
    _modules(srcs or [_root() + name + ".py"], deps, kernels, visibility, name = name, **attrs)

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
    benchmarks = native.glob(["benchmarks/**/*.py"])
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
_NEEDS = ["gpu", "gpu2", "gpu4", "npu", "vllm", "slow", "browser", "nodes"]

def _subject(name, deps):
    """What the tests of a folder or module are of: the target of the same name without `_test`, if there is one."""
    subject = name[:-len("_test")] if name.endswith("_test") else ""
    rule = native.existing_rule(subject) if subject and subject != _library_name() else None
    return [":" + subject] if rule and rule["kind"] == "py_library" and ":" + subject not in deps else []

def _pytest(srcs, deps, data, tags, args, hub, **attrs):
    needs = [tag for tag in tags if tag in _NEEDS]
    deps = deps + _subject(attrs["name"], deps)
    _python(
        py_test,
        srcs + ["//build:forked_processes.py", "//build:pytest_main.py"],
        deps + [requirement("pytest", hub)],
        args = ["$(rootpath %s)" % file for file in srcs] + ["--tessera-tag=" + tag for tag in needs] + args,
        data = data + ["//build:allowed_skips.txt", "//:pyproject.toml"],
        main = "//build:pytest_main.py",
        tags = tags,
        **attrs
    )

def _suites(names, test):
    """Names under which a test is run too: those that its folders and files would have as targets of their own."""
    for name in names:
        native.test_suite(name = name, tests = [":" + test], tags = ["manual"])

def package_test(name, folders = [], deps = [], data = [], size = "medium", tags = [], args = [], **attrs):
    """The pytest files of one folder, in one process, but for those that have a target of their own above it.

    pytest and the folder's target are added to what it declares.

    Args:
      name: of the target: the folder's name and _test; for the top folder that of the library or app and _test.
      folders: further ones whose tests run in the same process: to start it and import torch costs six seconds.
      deps: what the files import.
      data: files they read.
      size: small (4 minutes), medium (15) or large (30).
      tags: what all of them need: gpu, gpu2, gpu4, npu, vllm, slow, browser.
      args: further words for pytest.
      **attrs: as in py_test.
    """
    files = native.glob([_folder(folder) + "*_test.py" for folder in [name[:-len("_test")]] + folders])
    srcs = [file for file in files if not native.existing_rule(file[len(_root()):-len(".py")])]
    _suites([folder + "_test" for folder in folders], name)
    _pytest(srcs, deps, data, tags, args, "pypi", name = name, size = size, **attrs)

def module_test(name, srcs = None, deps = [], data = [], size = "small", tags = [], args = [], hub = "pypi", **attrs):
    """A pytest file with a process, tags, an environment or a hub of its own.

    Args:
      name: of the target; the file is that of this path from the top folder unless `srcs` says otherwise.
      srcs: the one file, where it is elsewhere.
      deps: what the file imports.
      data: files it reads.
      size: as in `package_test`.
      tags: what it needs, as in `package_test`.
      args: further words for pytest.
      hub: the repository that pytest comes from, for tests of another hub.
      **attrs: as in py_test.
    """
    srcs = srcs or [_root() + name + ".py"]
    if len(srcs) != 1:
        fail("module_test %s: one test file a target, got %s" % (name, srcs))
    _pytest(srcs, deps, data, tags, args, hub, name = name, size = size, **attrs)

def module_tests(name, srcs, together = False, deps = [], **attrs):
    """Pytest files that need the same, each with a target of its own, which has the name of the file.

    Args:
      name: of the suite of all of them, for `bazel test` by name.
      srcs: the files.
      together: whether they are one target, and run in one process.
      deps: what any of them imports, another of them included.
      **attrs: as in `module_test`.
    """
    names = [file[len(_root()) if file.startswith(_root()) else 0:-len(".py")] for file in srcs]
    if together:
        _suites(names, name)
        _pytest(srcs, deps, attrs.pop("data", []), attrs.pop("tags", []), [], "pypi", name = name, **attrs)
        return
    for test, file in zip(names, srcs):
        module_test(name = test, srcs = [file], deps = [dep for dep in deps if dep != ":" + test], **attrs)
    native.test_suite(name = name, tests = names, tags = ["manual"])

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
