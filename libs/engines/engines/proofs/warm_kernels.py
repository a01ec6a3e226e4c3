"""Compile and tune a run's kernels before it starts: `python -m engines warm-kernels MODEL [--engine.NAME VALUE ...]`.

Compilers keep what they make on disk, by versions, device, code and shapes: inductor in TORCHINDUCTOR_CACHE_DIR, Triton
in TRITON_CACHE_DIR, TileLang in TILELANG_CACHE_DIR. A later process finds it there, one of another machine where the
folders are carried over. One layer of each kind at true width compiles what all layers need.
"""

import itertools
import time
from typing import Any

from engines.build import build_engine
from engines.capability import without_deepep
from engines.config import EngineConfig
from engines.families.registry import admitted, checked_part, registered_family
from engines.fast.compiling import compilations
from engines.launch import RankError
from engines.loading import resolve_device
from engines.proofs.device import SINGLE
from engines.proofs.true_width import layer_subset
from engines.prove.comparison import sequences
from engines.prove.engine_result import WeightedSum, proof_batch, settings_of_proof
from engines.prove.forked_ranks import last_line, launch_forked
from engines.prove.generic_family import generic_family

LR = 1e-9
"""So small that the second step meets the weights of the first: a proof's own is as large as the gradient, and broke
a model of 2 B on a GPU."""


def warm_kernels(config: EngineConfig, model: Any) -> dict[str, float]:
    """Score and train rows of a transformers config twice, on one rank of the run's device, in a process of its own.

    The rows fill a micro-batch of `config.max_tokens_per_rank`. Return "first_s" and "second_s", seconds of a pass and
    a step: their difference is what a run now spares; "graphs" and "later_graphs", which each of them compiled;
    "tokens" and "layers".

    Raises:
        ValueError: the layers could not be built or run there.
    """
    try:
        result: dict[str, float] = launch_forked(_warm, (config, model), 1, config.device)
    except RankError as error:
        raise ValueError(f"kernels could not be warmed on {config.device}: {last_line(str(error))}") from error
    return result


def _warm(config: EngineConfig, model: Any) -> dict[str, float]:
    settings = settings_of_proof(without_deepep(config), **SINGLE, optimizer=config.optimizer, lr=LR)
    few = layer_subset(checked_part(model), resolve_device(settings))
    text, lengths, left = few.config.get_text_config(), list[int](), settings.max_tokens_per_rank
    for length in itertools.cycle(few.lengths):
        if length > left:
            break
        lengths.append(length)
        left -= length
    with admitted(few.config, registered_family(few.config) or generic_family(few.config)):
        engine = build_engine(settings, few.config)
        batch = proof_batch(sequences(lengths or [left], text.vocab_size))
        result: dict[str, float] = {"tokens": sum(lengths) or left, "layers": text.num_hidden_layers}
        for seconds, graphs in (("first_s", "graphs"), ("second_s", "later_graphs")):
            start, before = time.perf_counter(), compilations()
            engine.forward(batch)
            float(engine.train_batch(batch, WeightedSum())["loss"])  # waits for the device
            result |= {seconds: round(time.perf_counter() - start, 2), graphs: compilations() - before}
    return result
