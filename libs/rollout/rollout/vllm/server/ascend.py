"""vLLM on Ascend NPUs, by its plugin vllm-ascend: what weight sync needs of it, in the versions of it that were read.

vllm-ascend may keep matrices in a layout of their own (FRACTAL_NZ). New weights are read into the parameters as plain
rows, so that with this layout the model would compute with others: it refuses its own `wake_up` and
`start_weight_update` then, but not vLLM's `reload_weights`, by which weights are synced here.

No Ascend device was at hand. Names and signatures are compared with a table of its source distribution
(`rollout/testing/vllm_ascend.json`, made by `rollout.testing.read_vllm_ascend`), and nothing else of it has run.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet

PACKAGE = "vllm-ascend"
VERSIONS = ">=0.23.0,<0.24"
LAYOUT = "weight_nz_mode"
"""Name of the setting in vLLM's `additional_config`."""
LAYOUT_VARIABLE = "VLLM_ASCEND_ENABLE_NZ"
"""Older name of the setting, which `start_weight_update` reads."""


def installed() -> str | None:
    """Return the version of vllm-ascend in this environment; None where there is none."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def refuse_other_versions(release: str | None) -> None:
    """Raise ValueError unless this was written for the installed vllm-ascend."""
    if release is None:
        raise ValueError(f"vLLM on NPUs needs {PACKAGE} {VERSIONS}, which is not installed beside it")
    if not SpecifierSet(VERSIONS).contains(release, prereleases=True):
        raise ValueError(
            f"the adaptation of vLLM on NPUs was written for {PACKAGE} {VERSIONS}, and {release} is installed: install "
            "one of these versions"
        )


def ascend_arguments(
    arguments: Mapping[str, Any], environ: Mapping[str, str], release: str | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return vLLM's engine arguments with plain matrices, and the variables to set with them.

    Raises ValueError where vllm-ascend is missing or of another version, or its own layout is set.
    """
    refuse_other_versions(release)
    further = dict(arguments.get("additional_config") or {})
    settings = {LAYOUT: further.get(LAYOUT, 0), LAYOUT_VARIABLE: environ.get(LAYOUT_VARIABLE, "0")}
    for name, value in settings.items():
        if str(value) != "0":
            raise ValueError(f"{name}={value}: new weights are not read into matrices of such a layout, set it to 0")
    return {**arguments, "additional_config": {**further, LAYOUT: 0}}, {LAYOUT_VARIABLE: "0"}
