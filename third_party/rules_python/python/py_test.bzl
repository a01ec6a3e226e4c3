"""py_test by the name of its own file, as upstream has it."""

load(":defs.bzl", _py_test = "py_test")

py_test = _py_test
