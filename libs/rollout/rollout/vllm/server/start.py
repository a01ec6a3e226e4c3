"""The first lines of vLLM's process: run by path, `python .../rollout/vllm/server/start.py DESCRIPTOR`.

It makes this library importable beside vLLM, and nothing else of the folder that it is installed in: the trainer's
packages lie there too, in versions that vLLM may not want.
"""

import sys
import types
from pathlib import Path


def main() -> None:
    """Take the folder of this file off the path, put `rollout` in, serve."""
    here = Path(__file__).absolute()
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here.resolve().parent]
    package = types.ModuleType("rollout")
    package.__path__ = [str(here.parents[2])]
    sys.modules["rollout"] = package
    from rollout.vllm.server.serve import serve  # found by the path and the package made above

    serve(int(sys.argv[1]))


if __name__ == "__main__":
    main()
