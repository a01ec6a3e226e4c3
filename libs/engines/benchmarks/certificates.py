"""Prove every type of transformers with its default config: as `python -m engines prove --all`, with a date.

    python libs/engines/benchmarks/certificates.py DATE [TYPE ...]

With types, these alone are proven anew: the rows of the others stay.
"""

import sys
from pathlib import Path

from engines.proofs.every_type import main

if __name__ == "__main__":
    main(Path(__file__).parents[3] / "docs", sys.argv[1], sys.argv[2:])
