"""Macros of the apps' BUILD files. Unlike a library, an app is imported from the top of the repository: apps.NAME.file."""

load("@rules_python//python:defs.bzl", "py_library")
load("//build:defs.bzl", "module_test")

def _package_files(name):
    folders = name.split("/")[:-1]
    return ["/".join(folders[:depth] + ["__init__.py"]) for depth in range(len(folders) + 1)]

def app_module(name, deps = [], data = []):
    """One Python file of an app.

    Args:
      name: of the target; the file is name.py.
      deps: what it imports.
      data: files it reads.
    """
    py_library(
        name = name,
        srcs = [name + ".py"] + _package_files(name),
        data = data,
        visibility = ["//visibility:public"],
        deps = deps + ["//apps:init"],
    )

def app_test(name, deps = [], **attrs):
    """A pytest file of an app.

    Args:
      name: of the target; the file is name.py.
      deps: what it imports.
      **attrs: as in module_test.
    """
    module_test(name = name, srcs = [name + ".py"], deps = deps + ["//apps:init"], **attrs)
