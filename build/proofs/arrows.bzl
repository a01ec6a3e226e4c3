"""Which library may depend on which, held by Bazel's own query over the build graph."""

load("//build:defs.bzl", "module_test")

# Directly or not. The apps may see all of them, and none of them sees an app.
ARROWS = {
    "chat_tools": [],
    "dyncp": ["seqpack"],
    "engines": ["dyncp", "seqpack"],
    "objectives": ["seqpack"],
    "rollout": ["chat_tools", "seqpack"],
    "runlog": [],
    "runplan": [
        "chat_tools",
        "dyncp",
        "engines",
        "rollout",
        "seqpack",
    ],  # holds its arithmetic to their constants and to what they support
    "schedules": ["chat_tools", "rollout", "seqpack"],  # a trainer is known by a protocol
    "seqpack": [],
}

def arrow_words():
    """The arrows as one word, for the environment of a test: `dyncp:seqpack;...`."""
    return ";".join(["%s:%s" % (library, ",".join(allowed)) for library, allowed in ARROWS.items()])

def arrow_tests(name):
    """A query for each library, `deps(//libs/NAME)` within the project, and one test over their outputs.

    Args:
      name: of the test.
    """
    for library in ARROWS:
        native.genquery(
            name = "deps_of_" + library,
            expression = "filter('^//(libs|apps)', kind('rule', deps(//libs/{0}:{0})))".format(library),
            scope = ["//libs/" + library],
        )
    module_test(
        name = name,
        srcs = [name + ".py"],
        data = [":deps_of_" + library for library in ARROWS],
        env = {
            "ARROWS": arrow_words(),
        },
    )
