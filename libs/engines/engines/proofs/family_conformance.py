"""Measure a family's cases against stock transformers: what `python -m engines families` prints and a test bounds.

For each case, on sequences longer than its window, with dropout in the config and nothing as it was initialised:

1. The oracle is the stock model on one sequence at a time: log-probs from its own logits, the router's loss from
   transformers' own function over all sequences' router logits, and every gradient of their sum.
2. The same of the engine's scorer, packed and padded. Log-probs differ absolutely, gradients relative to the largest
   entry of the parameter's.
3. An export from a directory that transformers wrote: its files must be equal in names, dtypes and values, and what
   `from_pretrained` makes of them must give the same logits.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from engines.config import EngineConfig
from engines.execution.micro_batches import MicroBatch
from engines.families.registry import family_of
from engines.families.router import RouterCounts
from engines.families.torch_operations import choose_torch_operations
from engines.inputs.model_inputs import InputBuilder, PackedInputs, PaddedInputs
from engines.loading import load
from engines.proofs.family_cases import CASES, VOCABULARY, Case
from engines.scoring.packed_model import adapt_for_packing
from engines.scoring.token_scorer import TokenScorer
from engines.tiny import tiny_batch
from engines.weights.model_weights import live_tensors
from engines.weights.saving import save_configuration, save_weights
from seqpack.batches.packed import PackedBatch, pack_sequences

LENGTHS = (7, 2, 19, 1, 33, 12)
LOG_PROB_BOUND = 1e-5
GRADIENT_BOUND = 1e-4


@dataclass(frozen=True)
class Row:
    """One case: largest differences from stock transformers on one sequence at a time."""

    case: str
    log_prob_packed: float
    log_prob_padded: float
    gradient_packed: float
    gradient_padded: float
    auxiliary: float | None
    """Relative difference of the router's loss; None where the config asks for none."""
    names_and_dtypes: bool
    """Whether an export's files equal those that transformers wrote."""
    after_reload: float
    """Difference of logits, after export and from_pretrained."""

    @property
    def problems(self) -> list[str]:
        """The values that are beyond their bounds."""
        problems = [] if self.names_and_dtypes else ["exported files differ from those of transformers"]
        for name, bound in _BOUNDS.items():
            value = getattr(self, name)
            if value is not None and not value <= bound:
                problems.append(f"{name} {value:.1e} > {bound:.0e}")
        return problems


_BOUNDS = {
    "log_prob_packed": LOG_PROB_BOUND,
    "log_prob_padded": LOG_PROB_BOUND,
    "gradient_packed": GRADIENT_BOUND,
    "gradient_padded": GRADIENT_BOUND,
    "auxiliary": LOG_PROB_BOUND,
    "after_reload": 0.0,
}


@dataclass(frozen=True)
class _Result:
    log_probs: Tensor
    auxiliary: Tensor | None
    gradients: dict[str, Tensor]


def measure(case: Case, lengths: Sequence[int] = LENGTHS) -> Row:
    """Measure one case."""
    model = case.model()
    packed = pack_sequences(tiny_batch(list(lengths), vocab=VOCABULARY))
    want = _stock(copy.deepcopy(model), packed)
    got = {}
    for name, builder in (("padded", PaddedInputs()), ("packed", PackedInputs())):
        got[name] = _engine(copy.deepcopy(model), packed, builder, adapt=name == "packed")
    one, other = got["packed"], got["padded"]
    same, after_reload = _round_trip(case, packed)
    return Row(
        case=str(case),
        log_prob_packed=float((one.log_probs - want.log_probs).abs().max()),
        log_prob_padded=float((other.log_probs - want.log_probs).abs().max()),
        gradient_packed=_worst_gradient(one.gradients, want.gradients),
        gradient_padded=_worst_gradient(other.gradients, want.gradients),
        auxiliary=_relative(want.auxiliary, one.auxiliary, other.auxiliary),
        names_and_dtypes=same,
        after_reload=after_reload,
    )


def _relative(want: Tensor | None, *values: Tensor | None) -> float | None:
    """Return the worst relative difference; infinite where only one of the two has a router's loss."""
    if want is None and not any(one is not None for one in values):
        return None
    return max(float("inf") if one is None or want is None else float((one / want - 1).abs()) for one in values)


def _objective(log_probs: Tensor, auxiliary: Tensor | None) -> Tensor:
    """Return a loss with another weight for every log-prob, plus the router's loss."""
    loss = (log_probs * torch.sin(torch.arange(log_probs.numel(), dtype=log_probs.dtype))).mean()
    return loss if auxiliary is None else loss + auxiliary


def _stock(model: Any, packed: PackedBatch) -> _Result:
    choose_torch_operations(model)
    parts, routed = [], []
    config = model.config.get_text_config()
    for ids in packed.values["input_ids"].split(list(packed.lengths)):
        output = model(input_ids=ids[None], use_cache=False)
        table = torch.log_softmax(output.logits[0].float(), dim=-1)
        parts.append(table[:-1].gather(1, ids[1:, None]).squeeze(1))
        routed.append(getattr(output, "router_logits", None) or ())
    auxiliary = None
    if routed[0]:
        pooled = tuple(torch.cat(layer) for layer in zip(*routed, strict=True))
        function = sys.modules[type(model).__module__].load_balancing_loss_func
        auxiliary = function(pooled, config.num_experts, config.num_experts_per_tok) * config.router_aux_loss_coef
    log_probs = torch.cat(parts)
    _objective(log_probs, auxiliary).backward()
    return _Result(log_probs.detach(), None if auxiliary is None else auxiliary.detach(), _gradients(model))


def _engine(model: Any, packed: PackedBatch, builder: InputBuilder, adapt: bool) -> _Result:
    if adapt:
        adapt_for_packing(model)
    else:
        choose_torch_operations(model)
    scorer = TokenScorer(model, logit_chunk=16).eval()
    wanted = packed.token_mask
    wanted[packed.cu_seqlens[:-1].to(torch.int64)] = False
    inputs = builder.inputs(MicroBatch(packed, packed.indices, wanted, ranks=(0,)))
    scores = scorer(inputs, 1.0, False, routing=True)
    auxiliary = None
    if scores.routing is not None and scorer.router is not None:
        counts = RouterCounts(scores.routing.chosen, scores.routing.rows)
        auxiliary = scorer.router.loss(scores.routing.terms, counts)
    _objective(scores.log_probs, auxiliary).backward()
    return _Result(scores.log_probs.detach(), None if auxiliary is None else auxiliary.detach(), _gradients(model))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def _worst_gradient(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Return the worst difference, relative to its parameter's largest entry, at least a thousandth of that of all."""
    floor = 1e-3 * max(float(grad.abs().max()) for grad in want.values())
    return max(float((got[n] - grad).abs().max()) / max(float(grad.abs().max()), floor) for n, grad in want.items())


def _round_trip(case: Case, packed: PackedBatch) -> tuple[bool, float]:
    """Return (whether exported files equal those of transformers, difference of logits after from_pretrained)."""
    stock = AutoModelForCausalLM.from_config(case.config())
    stock.load_state_dict(case.model().state_dict())
    with TemporaryDirectory() as made:
        source, target = Path(made) / "stock", Path(made) / "export"
        stock.save_pretrained(source)
        loaded = load(EngineConfig(model=str(source)))
        target.mkdir()
        save_weights(loaded.weights.export(live_tensors(loaded.module).items()), target)
        save_configuration(loaded.weights, loaded.module, target)
        left, right = (load_file(path / "model.safetensors") for path in (source, target))
        same = left.keys() == right.keys() and all(
            right[n].dtype == t.dtype and torch.equal(right[n], t) for n, t in left.items()
        )
        # A copy: what is read lies as in its file, and multiplying rounds by where a matrix begins in memory.
        again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(target))
    ids = packed.values["input_ids"][None]
    for model in (again, stock):
        choose_torch_operations(model)
    with torch.no_grad():
        return same, float((again.eval()(ids).logits - stock.eval()(ids).logits).abs().max())


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the rows as markdown."""
    yield "| " + " | ".join(one.name.replace("_", " ") for one in fields(Row)) + " |"
    yield "| --- " * len(fields(Row)) + "|"
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in astuple(row)) + " |"


def _cell(value: str | float | bool | None) -> str:
    if isinstance(value, bool):
        return "equal" if value else "DIFFERENT"
    if isinstance(value, float):
        return f"{value:.1e}" if value else "0"
    return value or ""


def main() -> int:
    """Print the table and its problems; return 1 where there are any."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = [measure(case) for case in CASES]
    for family in sorted({family_of(case.config()).name for case in CASES}):
        print(f"Yes: {family}")
    print(
        f"transformers {transformers.__version__}, torch {torch.__version__}, float32, sequences of {LENGTHS} tokens\n"
    )
    print("\n".join(table(rows)))
    bad = [f"{row.case}: {problem}" for row in rows for problem in row.problems]
    print(
        "\n"
        + ("\n".join(bad) if bad else "all within bounds: " + ", ".join(f"{k} {v:.0e}" for k, v in _BOUNDS.items()))
    )
    return int(bool(bad))
