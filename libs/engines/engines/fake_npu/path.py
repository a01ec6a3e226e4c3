"""Processes in which `import torch_npu` gives the stand-in."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

SITE = Path(__file__).with_name("site")


def is_fake() -> bool:
    """Return whether `import torch_npu` gives the stand-in in this process."""
    spec = find_spec("torch_npu")
    return spec is not None and spec.origin is not None and SITE in Path(spec.origin).parents


@contextmanager
def fake_npu_on_path() -> Iterator[None]:
    """Put the stand-in on the path of processes started inside the block; this one does not import it."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(SITE), *([before] if before else [])])
    sys.path.insert(0, str(SITE))
    try:
        yield
    finally:
        sys.path.remove(str(SITE))
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
