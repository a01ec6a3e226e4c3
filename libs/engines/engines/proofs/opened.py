"""Open a type as a run does: `build_engine` reads a directory that stock transformers saved, in small, and one step of
the engine is held to stock transformers. A proof compares layers; this is what a user calls."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import AutoConfig

from engines.build import build_engine
from engines.config import EngineConfig
from engines.families.registry import admitted, checked_part, registered_family
from engines.prove.comparison import Difference, Result, difference, sequences, stock
from engines.prove.engine_result import engine_result, settings_of_proof
from engines.prove.generic_family import GenericFamily, TextPartFamily, generic_family
from engines.prove.lengths import proof_lengths
from engines.prove.proof import BUILD_ERRORS, random_model, small_config
from engines.prove.small_config import VOCABULARY, thresholds

LOG_PROBS = 3e-4
"""Largest difference of a log-prob that counts as equal: both compute in float32, in another order."""
GRADIENTS = 2e-3


def step_difference(config: Any, **options: Any) -> Difference:
    """Return how far log-probs and gradients of one step of an engine, with these options, are from stock transformers,
    one sequence at a time, both in float32.

    Raises:
        ValueError: the directory cannot be opened or trained.
    """
    part = checked_part(config)
    small, family = small_config(part), registered_family(part) or generic_family(part)
    model: Any = random_model(small).float()
    rows = sequences(proof_lengths(thresholds(small)), min(VOCABULARY, small.get_text_config().vocab_size))
    plain = EngineConfig(device="cpu", dtype="float32", max_tokens_per_rank=sum(map(len, rows)), **options)
    with TemporaryDirectory() as made:
        model.save_pretrained(made)
        described = checked_part(AutoConfig.from_pretrained(Path(made)))
        if isinstance(family, GenericFamily):
            family = replace(family, packs=plain.batching == "packed")
        with admitted(described, family):
            try:
                engine = build_engine(settings_of_proof(plain, model=made))
                got = engine_result(engine, rows)
            except BUILD_ERRORS as error:
                raise ValueError(f"an engine does not open it: {type(error).__name__}: {error}") from error
    want = stock(model, rows)
    own = family.trained(model) if isinstance(family, TextPartFamily) else want.gradients.keys()
    wanted = {name: grad for name, grad in want.gradients.items() if name in own and bool(grad.any())}
    if missing := sorted(wanted.keys() - got.gradients.keys()):
        raise ValueError(f"an engine does not train {missing[0]}")
    return difference(got, Result(want.log_probs, wanted))


def step_problem(difference: Difference) -> str:
    """Return what is wrong with a step; nothing where it is equal."""
    equal = difference.log_probs <= LOG_PROBS and difference.gradients <= GRADIENTS
    return "" if equal else f"a step of an engine differs from stock transformers: {difference}"
