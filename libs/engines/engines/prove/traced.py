"""Hold a model type's compiled layers (`engines.fast.traced_layers`) to its plain packed ones before they are used."""

from typing import Any

from engines.families.registry import admitted, checked_part, digest, registered_family
from engines.fast.compiling import compilations
from engines.fast.traced_layers import use_traced_layers
from engines.inputs.model_inputs import PackedInputs
from engines.prove.comparison import Difference, difference, packed_layers, scored, sequences
from engines.prove.float64 import KeepFloat64
from engines.prove.generic_family import generic_family
from engines.prove.lengths import proof_lengths
from engines.prove.proof import BUILD_ERRORS, random_model, small_config
from engines.prove.small_config import VOCABULARY, thresholds

TOLERANCE = 1e-8
_ANSWERS: dict[str, str | None] = {}


def compare_traced(config: Any, backend: str = "eager") -> Difference:
    """Return how far a type's traced layers are from its plain packed ones, in small and in float64.

    `backend`: torch.compile's; "eager" traces alone.
    """
    part = checked_part(config)
    small = small_config(part)
    model: Any = random_model(small)
    rows = sequences(proof_lengths(thresholds(small)), min(VOCABULARY, small.get_text_config().vocab_size))
    with admitted(small, registered_family(part) or generic_family(part)), packed_layers(model), KeepFloat64():
        want = scored(model, rows, PackedInputs())
        traced = use_traced_layers(model, backend)
        try:
            got = scored(model, rows, PackedInputs())
        finally:
            traced.undo()
    return difference(got, want)


def traced_refusal(config: Any) -> str | None:
    """Return why the layers of a config cannot be compiled as they are; None where they equal the plain ones."""
    key = digest(config)
    if key not in _ANSWERS:
        try:
            before, found = compilations(), compare_traced(config)
            equal = max(found.log_probs, found.gradients) <= TOLERANCE
            _ANSWERS[key] = None if equal else f"compiled layers differ from plain ones: {found}"
            if compilations() == before:
                _ANSWERS[key] = "its layers are not told where sequences begin"
        except BUILD_ERRORS as error:
            _ANSWERS[key] = f"its layers cannot be traced ({type(error).__name__}: {error})"
    return _ANSWERS[key]
