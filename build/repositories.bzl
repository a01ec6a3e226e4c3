"""The interpreter and the hubs: for WORKSPACE, and for MODULE.bazel as a module extension."""

load(":hub.bzl", "pip_hub")
load(":python.bzl", "python_interpreter")

def repositories():
    """Declares @interpreter and every hub. A hub is fetched when a target needs it."""

    # The interpreter of every target, with nothing installed beside it. The locks hold for each of these versions;
    # $TESSERA_PYTHON chooses one.
    python_interpreter(
        name = "interpreter",
        versions = [
            "3.11",
            "3.12",
            "3.13",
        ],
    )

    # What nearly everything needs; --config=cuda swaps the lock.
    pip_hub(
        name = "pypi",
        fallback_lock = "//build/locks:cuda.txt",
        lock = "//build/locks:cpu.txt",
        variants = {"cuda": "//build/locks:cuda.txt"},
    )

    pip_hub(
        name = "pypi_tf517",
        fallback_lock = "//build/locks:cuda.txt",
        lock = "//build/locks:tf517.txt",
    )

    # What adapters speak to, over the packages of @pypi.
    pip_hub(
        name = "pypi_extras",
        lock = "//build/locks:extras.txt",
        over = "pypi",
        over_lock = "//build/locks:cpu.txt",
    )

    # OpenEnv, which wants another mcp than those.
    pip_hub(
        name = "pypi_openenv",
        lock = "//build/locks:openenv.txt",
        over = "pypi",
        over_lock = "//build/locks:cpu.txt",
        without = [
            "gradio",
            "httptools",
            "uvloop",
            "watchfiles",
        ],
    )

    # Agent frameworks, which want another openai than those.
    pip_hub(
        name = "pypi_agents",
        lock = "//build/locks:agents.txt",
        over = "pypi",
        over_lock = "//build/locks:cpu.txt",
    )

    # Kernels for CUDA devices, over the packages of @pypi; --config=cuda adds them to what imports them.
    pip_hub(
        name = "pypi_kernels",
        lock = "//build/locks:kernels.txt",
        over = "pypi",
        over_lock = "//build/locks:cpu.txt",
    )

    # Chat templates of real models, as files.
    pip_hub(
        name = "pypi_templates",
        data_only = True,
        lock = "//build/locks:templates.txt",
    )

    # Templates and parsers of others, as files: what takes minutes reads them.
    pip_hub(
        name = "pypi_corpus",
        data_only = True,
        lock = "//build/locks:corpus.txt",
        sources = [
            "llama-cpp-python",
            "vllm",
        ],
    )

    # What builds wheels and looks at the tree.
    pip_hub(
        name = "pypi_tools",
        local_builds = [],
        lock = "//build/locks:tools.txt",
    )

    # vLLM for CPUs, for a process of its own: torch of @pypi, everything else at vLLM's own versions.
    pip_hub(
        name = "pypi_vllm",
        lock = "//build/locks:vllm.txt",
        over = "pypi",
        over_lock = "//build/locks:cpu.txt",
        over_packages = [
            "filelock",
            "fsspec",
            "jinja2",
            "markupsafe",
            "mpmath",
            "networkx",
            "setuptools",
            "sympy",
            "torch",
            "typing-extensions",
        ],
        without = [
            "torchaudio",
            "torchcodec",
            "torchvision",
            "triton",
        ],
    )
