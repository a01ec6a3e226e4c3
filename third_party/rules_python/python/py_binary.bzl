"""py_binary by the name of its own file, as upstream has it."""

load(":defs.bzl", _py_binary = "py_binary")

py_binary = _py_binary
