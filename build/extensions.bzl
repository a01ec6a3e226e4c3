"""The repositories of repositories.bzl for MODULE.bazel. Bazel 4 knows no module extensions and never reads this file."""

load(":repositories.bzl", "repositories")

def _hubs_impl(_ctx):
    repositories()

hubs = module_extension(implementation = _hubs_impl)
