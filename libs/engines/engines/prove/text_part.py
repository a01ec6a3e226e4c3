"""Hold directories of a type without a family to stock transformers, and the text part of a multi-modal one to the
whole: nothing else is trained, exports have all else bit for bit.

1. No parameter outside of the text model and the output layer has a gradient on text.
2. The model in small is saved by transformers. What the engine opens of that directory (of a multi-modal one the text
   part alone), trains by a small step here, and writes, is read by the class that the checkpoint names: its log-probs
   are those of the stock model after the same step, and every other tensor has the same bytes.
"""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from engines.prove.comparison import Result, largest, stock
from engines.prove.generic_family import GenericFamily, TextPartFamily, is_inside
from engines.weights.disk_names import names_in
from engines.weights.disk_weights import DiskWeights
from engines.weights.empty_model import allocate, empty_model, meta_model
from engines.weights.model_directory import ModelDirectory
from engines.weights.model_weights import ModelWeights, live_tensors
from engines.weights.saving import save_configuration, save_weights
from engines.weights.stock_names import names_read

STEP = 1e-2
"""The largest of what is added to values that are trained: another for each, as norms take a mean away."""
SAME = 3e-5
"""Largest difference of a log-prob that counts as equal: buffers are computed in float32."""


def separate(model: Any, family: TextPartFamily, want: Result) -> str:
    """Return which parameter outside of the text part has a gradient on text, if one has; freeze all of them."""
    own = family.trained(model)
    other = [name for name, grad in want.gradients.items() if name not in own and bool(grad.any())]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    return f"its text part is not separate: {other[0]} is no part of it and has a gradient" if other else ""


def export_problem(model: Any, family: GenericFamily, rows: Sequence[Tensor], want: Result) -> str:
    """Return what is wrong with an export of the whole, after its text part was trained; see the module's text."""
    with TemporaryDirectory() as made:
        source, target = Path(made) / "stock", Path(made) / "export"
        target.mkdir()
        try:
            model.save_pretrained(source)
            opened, weights = _opened(model.config, family, ModelDirectory.read(source))
            with torch.no_grad():
                for parameter in opened.parameters():
                    parameter.add_(_step(parameter))
            save_weights(weights.export(live_tensors(opened).items()), target)
            save_configuration(weights, opened, target)
            before, after = ModelDirectory.read(source), ModelDirectory.read(target)
            auto = AutoModelForImageTextToText if family.inside else AutoModelForCausalLM
            again = auto.from_pretrained(
                target, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            )
        except (KeyError, OSError, RuntimeError, StrictDataclassError, TypeError, ValueError) as error:
            return f"a directory of it cannot be opened and exported: {error}"
        if before.tensors.keys() != after.tensors.keys():
            return f"its export lacks or adds {sorted(before.tensors.keys() ^ after.tensors.keys())[0]}"
        for name, one, other in _pairs(weights.carried, before, after):
            if one.dtype != other.dtype or not torch.equal(one, other):
                return f"its export has other values of {name}, which is not trained"
        return _step_problem(model, family, again.eval(), rows, want)


def _opened(config: Any, family: GenericFamily, source: ModelDirectory) -> tuple[Any, ModelWeights]:
    """Open a directory as the engine does; return the text part in float64, and its names there."""
    dtype = torch.float64
    inside = is_inside(config)
    module, whole = empty_model(config, dtype, inside, family), meta_model(config, dtype, inside)
    names = names_in(source.tensors, module, whole)
    weights = ModelWeights.of(family, module, source, names, names_read(whole, source.tensors))
    disk = DiskWeights.of(weights, module)
    allocate(module, torch.device("cpu"))
    disk.fill(module)
    return module.eval(), weights


def _step(parameter: Tensor) -> Tensor:
    return STEP * torch.sin(torch.arange(parameter.numel(), dtype=parameter.dtype)).view(parameter.shape)


def _pairs(names: Sequence[str], before: ModelDirectory, after: ModelDirectory) -> Any:
    for (name, one), (_, other) in zip(before.load(names), after.load(names), strict=True):
        yield name, one, other


def _step_problem(model: Any, family: GenericFamily, again: Any, rows: Sequence[Tensor], want: Result) -> str:
    """Return what is wrong where the reloaded export and the stock model after the same step differ."""
    own = family.trained(model)
    trained = [parameter for name, parameter in model.named_parameters() if name in own]
    with torch.no_grad():
        before = [parameter.clone() for parameter in trained]
        for parameter in trained:
            parameter.add_(_step(parameter))
        stepped = stock(model, rows, gradients=False).log_probs
        for parameter, value in zip(trained, before, strict=True):
            parameter.copy_(value)
    got = stock(again, rows, gradients=False).log_probs
    if not (difference := largest(got - stepped)) <= SAME:
        return f"its export, read by {type(again).__name__}, differs by {difference:.1e} in a log-prob"
    if largest(stepped - want.log_probs) < 100 * SAME:
        return "its export would not show a step: what is trained is not what stock transformers computes with"
    return ""
