"""`build_once FILE` builds the stand-in's library: Bazel does so once for all tests. An empty file where it cannot."""

import sys
from pathlib import Path

from engines.fake_npu.build import build, reason_against


def main() -> None:
    """Write the file that is named."""
    path = Path(sys.argv[1]).absolute()
    if reason := reason_against():
        print(f"the stand-in for NPUs is not built: {reason}", file=sys.stderr)
        path.touch()
    else:
        build(path)


if __name__ == "__main__":
    main()
