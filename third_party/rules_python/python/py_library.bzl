"""py_library by the name of its own file, as upstream has it."""

load(":defs.bzl", _py_library = "py_library")

py_library = _py_library
