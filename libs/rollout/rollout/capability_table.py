"""The table of `python -m rollout capabilities`: each backend's answers to `supports`, the text of CAPABILITIES.md."""

from rollout.capability import FEATURES, backend_supports
from seqpack.capability import Supported, Unsupported, capability_table

TEXT = """# What the rollout engines can do

Printed by `python -m rollout capabilities`, from what `supports(feature)` answers: each yes names the test that shows
it (a file below `rollout/`, its target is `//libs/rollout:` and that name), each no says why. A feature that a
backend was never asked for has no answer.

"""


def answers() -> dict[str, dict[str, Supported | Unsupported]]:
    """Return whether each feature is supported, by backend."""
    return {
        name: {feature: backend_supports(name, feature) for feature in features} for name, features in FEATURES.items()
    }


def main() -> int:
    """Print the table."""
    print(TEXT + capability_table(answers()), end="")
    return 0
