"""The names of rules_python that this project loads, over Bazel's native rules.

Upstream adds a migration tag that --incompatible_load_python_rules_from_bzl asks for; so do we.
"""

load("@bazel_tools//tools/python:toolchain.bzl", _py_runtime_pair = "py_runtime_pair")

_MIGRATION_TAG = "__PYTHON_RULES_MIGRATION_DO_NOT_USE_WILL_BREAK__"

def _tagged(attrs):
    tags = attrs.get("tags") or []
    attrs["tags"] = tags + [_MIGRATION_TAG]
    return attrs

def py_library(**attrs):
    native.py_library(**_tagged(attrs))

def py_binary(**attrs):
    native.py_binary(**_tagged(attrs))

def py_test(**attrs):
    native.py_test(**_tagged(attrs))

def py_runtime(**attrs):
    native.py_runtime(**_tagged(attrs))

py_runtime_pair = _py_runtime_pair
