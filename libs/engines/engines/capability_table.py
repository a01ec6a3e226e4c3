"""`python -m engines capabilities`: what each backend answers to `supports`, the text of CAPABILITIES.md."""

from engines.backends import TRAIN_BACKENDS
from engines.capability import Supported, Unsupported, supports
from engines.config import EngineConfig
from seqpack.capability import capability_table

TEXT = """# What the engines can do

Printed by `python -m engines capabilities`, from what `supports(feature)` answers: each yes names the test that shows
it (a file below `engines/`, its target is `//libs/engines:` and that name), each no says why. Rows `cpu`, `cuda` and
`npu` are devices; tests in files named `cuda` run where there is a GPU, those of `npu` on a stand-in so far. What is
refused in combination says so when a configuration is made or built, and docs/engines.md has it in words.

"""


def answers() -> dict[str, dict[str, Supported | Unsupported]]:
    """Return every feature's answer, by backend."""
    table: dict[str, dict[str, Supported | Unsupported]] = {}
    for name, backend in TRAIN_BACKENDS.items():
        config = EngineConfig(backend=name)
        table[name] = {feature: supports(config, feature) for feature in backend.features}
    return table


def main() -> int:
    """Print the table."""
    print(TEXT + capability_table(answers()), end="")
    return 0
