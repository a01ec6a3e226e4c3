"""Fields of megatron-core's TransformerConfig that a user sets: checked by name, by type, and against what has run."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any

from megatron.core.transformer.transformer_config import TransformerConfig

RUN: Mapping[str, type] = {"deallocate_pipeline_outputs": bool, "microbatch_group_size_per_vp_stage": int}
"""Options that `layouts_test` has run: they change the pipeline's schedule, not its results."""

REPLACEMENTS: Mapping[str, str] = {
    "max_seqlen_per_dp_cp_rank": "max_tokens_per_rank, the one cap on a rank's tokens",
    "hybrid_context_parallel": "context_parallel='dynamic'",
    "context_parallel_size": "context_parallel='static:N'",
    "recompute_granularity": "gradient_checkpointing",
}
"""Our settings for fields of megatron-core's."""


def checked_options(given: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, as they go into a TransformerConfig beside `ours`.

    Raises:
        ValueError: there is no such field, it follows from model or settings, no test has run it, or its type is wrong.
    """
    known = [field.name for field in dataclasses.fields(TransformerConfig)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"transformer_options: megatron-core's TransformerConfig has no field {name}"
                + (f", did you mean {near[0]}?" if near else "")
            )
        if name in ours:
            raise ValueError(
                f"transformer_options: {name} follows from the model or from other settings of the engine: leave it out"
            )
        if name in REPLACEMENTS:
            raise ValueError(f"transformer_options: {name} is set by {REPLACEMENTS[name]}: leave it out")
        if name not in RUN:
            raise ValueError(
                f"transformer_options: {name} has not been run; {', '.join(RUN)} have. A row of "
                "engines/proofs/megatron_layouts.py and a line in engines/megatron/config/transformer_options.py add it"
            )
        if type(value) is not RUN[name]:
            raise ValueError(f"transformer_options: {name} must be {RUN[name].__name__}, got {value!r}")
    return dict(given)
