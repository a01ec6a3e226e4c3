"""A hub of third-party Python packages, installed by pip from a lock file with hashes.

`@NAME//PACKAGE` is a py_library of that package and, by its wheel's metadata, of all it needs. Each package lies in a
directory of its own that is one input to Bazel, so a target sees the packages it declares and no others. What is changed
in it later, by hand, bazelw tells Bazel (hub_look.py).
"""

def _pip_hub_impl(ctx):
    variant = ctx.os.environ.get("TESSERA_HUB", "")
    other = ctx.attr.variants_by_name.get(variant, None) if variant else None
    lock = ctx.path(Label(other)) if other else ctx.path(ctx.attr.lock)

    # A variant wants the builds of the registry, with the libraries that they need, whatever else pip has (torch +cpu).
    local_builds = [] if other else ctx.attr.local_builds
    python = ctx.read(ctx.path(Label("@interpreter//:base.txt"))).strip()
    command = [
        python,
        "-I",
        ctx.path(ctx.attr._install),
        "--hub=" + ctx.name,
        "--lock=" + str(lock),
        "--target=" + str(ctx.path("")),
    ] + ["--local-build=" + name for name in local_builds]
    if ctx.attr.data_only:
        command.append("--data-only")
    if ctx.attr.fallback_lock:
        command.append("--fallback-lock=" + str(ctx.path(ctx.attr.fallback_lock)))
    if ctx.attr.base_hub:
        command += ["--base-hub=" + ctx.attr.base_hub, "--base-lock=" + str(ctx.path(ctx.attr.base_lock))]
        command += ["--base-package=" + name for name in ctx.attr.base_packages]
    command += ["--without=" + name for name in ctx.attr.without]
    command += ["--source=" + name for name in ctx.attr.sources]
    ctx.report_progress("pip installs the packages of " + lock.basename)
    result = ctx.execute(command, timeout = 3600, quiet = False)
    if result.return_code != 0:
        fail("the packages of @%s could not be installed from %s; the reason stands above" % (ctx.name, lock))
    noted = ctx.execute([python, "-BEs", ctx.path(ctx.attr._look), "--installed", str(ctx.path(""))], timeout = 3600)
    if noted.return_code != 0:
        fail("what @%s holds could not be noted: %s" % (ctx.name, noted.stderr))

_pip_hub = repository_rule(
    implementation = _pip_hub_impl,
    attrs = {
        "base_hub": attr.string(),
        "base_lock": attr.label(allow_single_file = True),
        "base_packages": attr.string_list(),
        "data_only": attr.bool(),
        "fallback_lock": attr.label(allow_single_file = True),
        "local_builds": attr.string_list(),
        "lock": attr.label(allow_single_file = True, mandatory = True),
        "sources": attr.string_list(),
        "variants_by_name": attr.string_dict(),
        "without": attr.string_list(),
        "_install": attr.label(default = "//build:install_hub.py", allow_single_file = True),
        "_look": attr.label(default = "//build:hub_look.py", allow_single_file = True),
    },
    environ = ["TESSERA_HUB"],
)

def pip_hub(name, lock, fallback_lock = None, local_builds = ["torch"], variants = {}, data_only = False, over = None, over_lock = None, over_packages = [], without = [], sources = []):
    """Declares the hub `@name`.

    Args:
      name: of the repository.
      lock: the lock file (label).
      fallback_lock: where packages are looked up that the lock lacks, because this machine's pip chose another
        build (of torch) than the lock was made for.
      local_builds: packages of which this machine's pip may prefer a build of its own (torch +cpu); the lock lists the
        hashes of all that are accepted. A variant's lock lists none.
      over: the hub under this one: what its lock (`over_lock`) lists is depended on there and not installed again.
      over_lock: the lock of that hub.
      over_packages: only these packages of that hub lie under this one (with all they need); all of them where empty.
      without: packages that a wheel asks for and nobody imports.
      sources: packages of a `data_only` hub whose source distribution is unpacked, and not built.
      data_only: the lock's packages are read as files and never imported: what they need is left out.
      variants: lock files by the value of $TESSERA_HUB, used in place of `lock` (--config=cuda).
    """
    _pip_hub(
        name = name,
        base_hub = over,
        base_lock = over_lock,
        base_packages = over_packages,
        data_only = data_only,
        lock = lock,
        fallback_lock = fallback_lock,
        local_builds = local_builds,
        sources = sources,
        variants_by_name = variants,
        without = without,
    )
