"""A hub of third-party Python packages, installed by pip from a lock file with hashes.

`@NAME//PACKAGE` is a py_library of that package and, by its wheel's metadata, of all it needs. Each package lies in a
directory of its own that is one input to Bazel, so a target sees the packages it declares and no others.
"""

def _pip_hub_impl(ctx):
    variant = ctx.os.environ.get("TESSERA_HUB", "")
    lock = ctx.attr.variants_by_name.get(variant, None) if variant else None
    lock = ctx.path(Label(lock)) if lock else ctx.path(ctx.attr.lock)
    command = [
        ctx.read(ctx.path(Label("@python311//:base.txt"))).strip(),
        "-I",
        ctx.path(ctx.attr._install),
        "--hub=" + ctx.name,
        "--lock=" + str(lock),
        "--target=" + str(ctx.path("")),
    ] + ["--local-build=" + name for name in ctx.attr.local_builds]
    if ctx.attr.data_only:
        command.append("--data-only")
    if ctx.attr.fallback_lock:
        command.append("--fallback-lock=" + str(ctx.path(ctx.attr.fallback_lock)))
    ctx.report_progress("pip installs the packages of " + lock.basename)
    result = ctx.execute(command, timeout = 3600, quiet = False)
    if result.return_code != 0:
        fail("the packages of @%s could not be installed from %s; the reason stands above" % (ctx.name, lock))

_pip_hub = repository_rule(
    implementation = _pip_hub_impl,
    attrs = {
        "data_only": attr.bool(),
        "fallback_lock": attr.label(allow_single_file = True),
        "local_builds": attr.string_list(),
        "lock": attr.label(allow_single_file = True, mandatory = True),
        "variants_by_name": attr.string_dict(),
        "_install": attr.label(default = "//build:install_hub.py", allow_single_file = True),
    },
    environ = ["TESSERA_HUB"],
)

def pip_hub(name, lock, fallback_lock = None, local_builds = ["torch"], variants = {}, data_only = False):
    """Declares the hub `@name`.

    Args:
      name: of the repository.
      lock: the lock file (label).
      fallback_lock: where packages are looked up that the lock lacks, because this machine's pip chose another
        build (of torch) than the lock was made for.
      local_builds: packages of which this machine's pip may prefer a build of its own (torch +cpu); the lock lists the
        hashes of all that are accepted.
      data_only: the lock's packages are read as files and never imported: what they need is left out.
      variants: lock files by the value of $TESSERA_HUB, used in place of `lock` (--config=cuda).
    """
    _pip_hub(
        name = name,
        data_only = data_only,
        lock = lock,
        fallback_lock = fallback_lock,
        local_builds = local_builds,
        variants_by_name = variants,
    )
