"""Wheels and sdists of the libraries: `./bazelw build //libs:wheels`, or one by `./bazelw build //libs/NAME:wheel`."""

load(":version.bzl", "HOME", "VERSION")

_ENDS = {"sdist": ".tar.gz", "wheel": "-py3-none-any.whl"}

def _distribution_impl(ctx):
    library = ctx.label.package.split("/")[-1]
    out = ctx.actions.declare_file("tessera_%s-%s%s" % (library, VERSION, _ENDS[ctx.attr.kind]))
    arguments = ctx.actions.args()
    arguments.add("--kind", ctx.attr.kind)
    arguments.add("--root", ctx.label.package)
    arguments.add("--out", out)
    if HOME:
        arguments.add("--home", HOME)
    arguments.add_all(ctx.files.srcs)
    ctx.actions.run(
        executable = ctx.executable._build,
        arguments = [arguments],
        inputs = ctx.files.srcs,
        outputs = [out],
        mnemonic = "PythonDistribution",
        progress_message = "Building the %s of tessera-%s" % (ctx.attr.kind, library),
    )
    return [DefaultInfo(files = depset([out]), runfiles = ctx.runfiles([out]))]

distribution = rule(
    implementation = _distribution_impl,
    attrs = {
        "kind": attr.string(mandatory = True, values = ["sdist", "wheel"]),
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "_build": attr.label(default = "//build:dist", cfg = "exec", executable = True),
    },
    doc = "The wheel or the sdist of the library whose package this is, from its `srcs`, the same bytes wherever they lie.",
)
