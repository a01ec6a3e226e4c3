"""The grpo app with vLLM beside it: `bazel run //apps/grpo:vllm -- --recipe quickstart-vllm`.

The same app as `//apps/grpo`, which does not fetch vLLM's packages and finds vLLM by $TESSERA_VLLM_PYTHON.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

from apps.common.cli import command_line as cli
from apps.common.samplers import sampler_backend
from apps.grpo.main import main

PYTHON = Path(__file__).parents[3] / "libs" / "rollout" / "vllm_python"  # where Bazel puts it

if __name__ == "__main__":
    for variable in sampler_backend("vllm").variables:
        os.environ.setdefault(variable, str(PYTHON.absolute()))
    cli.main(lambda: main(sys.argv[1:]))
