"""Documentation targets of other rules, which nothing here builds."""

def bzl_library(name, visibility = None, **_attrs):
    native.filegroup(name = name, visibility = visibility)
