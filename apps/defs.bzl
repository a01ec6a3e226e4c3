"""The macros of the apps' BUILD files by their former names, until those files are written anew."""

load("//build:defs.bzl", "module", "module_test")

app_module = module
app_test = module_test
