"""Is a packed row of sequences the same to a model as the sequences one by one? A check for any causal language model.

    from seqpack.testing.isolation import assert_packing_isolated
    assert_packing_isolated(model)                       # transformers' own packing: position ids that start again
    assert_packing_isolated(model, my_packed_forward)    # yours

What is measured, each by itself enough for a verdict:

1. Logits and the gradient of every parameter, packed against alone. Both are rounded differently, so they have bounds;
   in half precision at least `NOISE` times what one unit in the last place of the embedded tokens does to them.
2. The logits of all other sequences when one is changed. Both rows have one shape, so hardly anything may move.
3. The gradient of each sequence's logits at the embedded tokens of all others. It is exactly zero where nothing leaks,
   so that no rounding hides a leak, however small: one boundary missed, behind a state that decays fast.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from seqpack.batches.packed import PackedBatch
from seqpack.planning.padding import packed_geometry
from seqpack.testing.account import HALF, IsolationReport, Tolerance
from seqpack.testing.embedding import input_embedding, perturbed_rounding, reach, watched
from seqpack.testing.trace import Origin, find_origin, relative_error

PackedForward = Callable[[nn.Module, PackedBatch], Tensor]
AloneForward = Callable[[nn.Module, Tensor], Tensor]
LENGTHS = (17, 1, 70, 6, 34, 3)
"""Sequences that span, begin within and begin at a chunk of 64 tokens. 131 in all, a prime: a dimension of this size is
the token dimension."""
NOISE = 8.0
"""Rounding may differ by so many times what one unit in the last place of the embedded tokens changes."""
ROUNDINGS = 2
"""Ways of rounding the embedded tokens anew that are tried, of which the worst counts."""
MOST = (0.5, 1.0)
"""No bound on logits and on gradients grows beyond these."""


def position_reset_forward(model: nn.Module, packed: PackedBatch) -> Tensor:
    """Run a Hugging Face model by its documented packing: one row, restarted position ids, no mask, no cache."""
    out = model(input_ids=packed.values["input_ids"][None], position_ids=packed.position_ids[None], use_cache=False)
    result: Tensor = out.logits
    return result


def plain_forward(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Run a Hugging Face model on one sequence [t]."""
    result: Tensor = model(input_ids=input_ids[None], use_cache=False).logits
    return result


def check_packing(
    model: nn.Module,
    packed_forward: PackedForward | None = None,
    alone_forward: AloneForward | None = None,
    lengths: Sequence[int] = LENGTHS,
    vocab_size: int | None = None,
    align: int = 1,
    bucket: int | None = None,
    grads: bool = True,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Measure how far packing is from running the sequences one by one; the model is left as it was found.

    Args:
        model: any module; run in eval mode (dropout would hide everything), its parameters' `.grad` is not touched.
        packed_forward: (model, packed) -> logits [T, V] or [1, T, V]; transformers' own packing where None.
            `packed.values` has "input_ids".
        alone_forward: (model, input_ids [t]) -> logits [t, V] or [1, t, V]; a plain call where None.
        lengths: of the sequences; their sum should not be a size that the model also has elsewhere.
        vocab_size: random tokens are drawn below it; that of the input embedding where None.
        align: pad each sequence to a multiple of this, as context or tensor parallel ranks do.
        bucket: pad the row to a multiple of this.
        grads: also compare gradients, of the parameters that require one.
        tolerance: `Tolerance.of` the first parameter's dtype where None.
        seed: of tokens and gradient weights.

    Raises:
        ValueError: fewer than two sequences, no parameter to take a gradient of, logits of another shape, or a model
            that gives different logits when the same row is run twice.
    """
    if len(lengths) < 2 or min(lengths) < 1:
        raise ValueError(f"give at least two lengths of at least 1, got {tuple(lengths)}")
    first = next(model.parameters())
    bounds = tolerance or Tolerance.of(first.dtype)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = vocab_size or _vocabulary(model)
    ids, others = (
        [torch.randint(0, vocabulary, (n,), generator=generator).to(first.device) for n in lengths] for _ in range(2)
    )
    run_packed, run_alone = packed_forward or position_reset_forward, alone_forward or plain_forward
    with _eval_mode(model):
        rows = _Rows(model, run_packed, run_alone, lengths, align, bucket)
        weights = [torch.randn(n, generator=generator).to(first.device) for n in lengths]
        together, grads_packed = rows.packed(ids, weights if grads else None)
        apart, grads_alone = rows.alone(ids, weights if grads else None)
        rounded = rows.rounded(ids, weights if grads else None, seed) if first.dtype in HALF else []
        logit_bound = _logit_bound(bounds.logits, apart, [logits for logits, _ in rounded])
        reached = rows.reached(ids, weights, bounds.reached) if grads else ()
        rows.check_repeats(ids, together, bounds.moved)
        moved = rows.moved(ids, others, together, bounds.moved)
        errors = tuple(relative_error(a, b) for a, b in zip(together, apart, strict=True))
        origin = None
        if max(errors) > logit_bound or moved:
            origin = rows.origin(ids, logit_bound)
    noisy = [others for _, others in rounded]
    worst, grad_bound = _worst_grad(grads_packed, grads_alone, noisy, bounds.grads) if grads else (None, 0.0)
    return IsolationReport(errors, worst, moved, origin, bounds, reached, logit_bound, grad_bound)


def assert_packing_isolated(
    model: nn.Module,
    packed_forward: PackedForward | None = None,
    alone_forward: AloneForward | None = None,
    lengths: Sequence[int] = LENGTHS,
    vocab_size: int | None = None,
    align: int = 1,
    bucket: int | None = None,
    grads: bool = True,
    tolerance: Tolerance | None = None,
    seed: int = 0,
) -> IsolationReport:
    """Raise AssertionError with the report where packing leaks, else return it; arguments as for `check_packing`."""
    report = check_packing(
        model, packed_forward, alone_forward, lengths, vocab_size, align, bucket, grads, tolerance, seed
    )
    if not report.isolated:
        raise AssertionError(str(report))
    return report


class _Rows:
    """The two ways of running the same sequences."""

    def __init__(
        self,
        model: nn.Module,
        run_packed: PackedForward,
        run_alone: AloneForward,
        lengths: Sequence[int],
        align: int,
        bucket: int | None,
    ) -> None:
        self.model, self.run_packed, self.run_alone = model, run_packed, run_alone
        self.geometry = packed_geometry(list(lengths), align, bucket)
        self.spans = list(zip(self.geometry.cu_seqlens, self.geometry.lengths, strict=False))
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]

    def row(self, ids: Sequence[Tensor]) -> PackedBatch:
        """Pack token ids into one row, padding with token 0."""
        total, device = self.geometry.total, ids[0].device
        tokens = torch.zeros(total, dtype=torch.int64, device=device)
        for piece, (start, length) in zip(ids, self.spans, strict=True):
            tokens[start : start + length] = piece
        cu = torch.tensor(self.geometry.cu_seqlens, dtype=torch.int32, device=device)
        sizes = cu.diff().long()
        positions = torch.arange(total, device=device) - torch.repeat_interleave(cu[:-1].long(), sizes)
        return PackedBatch(
            values={"input_ids": tokens},
            cu_seqlens=cu,
            max_seqlen=self.geometry.max_seqlen,
            positions=positions,
            lengths=self.geometry.lengths,
            indices=tuple(range(len(ids))),
            geometry=self.geometry,
            token_dims={"input_ids": 0},
        )

    def logits(self, output: Tensor, tokens: int) -> Tensor:
        """Check a forward's result and drop its batch dimension."""
        flat = output[0] if output.dim() == 3 and output.shape[0] == 1 else output
        if flat.dim() != 2 or flat.shape[0] != tokens:
            raise ValueError(
                f"the forward must return logits [{tokens}, V] or [1, {tokens}, V], got {tuple(output.shape)}"
            )
        return flat

    def packed(self, ids: Sequence[Tensor], weights: Sequence[Tensor] | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run the row; return each sequence's logits, and gradients where weights are given."""
        with torch.set_grad_enabled(weights is not None):
            flat = self.logits(self.run_packed(self.model, self.row(ids)), self.geometry.total)
            parts = [flat[start : start + length] for start, length in self.spans]
            grads = self.grads([_loss(p, w) for p, w in zip(parts, weights, strict=True)]) if weights else {}
        return [p.detach() for p in parts], grads

    def check_repeats(self, ids: Sequence[Tensor], before: Sequence[Tensor], bound: float) -> None:
        """Raise ValueError where running the row again gives other logits."""
        noise = max(relative_error(a, b) for a, b in zip(self.packed(ids, None)[0], before, strict=True))
        if noise > bound:
            raise ValueError(
                f"the same row run twice gives logits that differ by {noise:.1e}: make the model deterministic"
            )

    def alone(self, ids: Sequence[Tensor], weights: Sequence[Tensor] | None) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Run each sequence by itself; gradients are summed."""
        parts: list[Tensor] = []
        total: dict[str, Tensor] = {}
        for index, piece in enumerate(ids):
            with torch.set_grad_enabled(weights is not None):
                part = self.logits(self.run_alone(self.model, piece), piece.numel())
                grads = self.grads([_loss(part, weights[index])]) if weights else {}
            parts.append(part.detach())
            for name, grad in grads.items():
                total[name] = total[name] + grad if name in total else grad
        return parts, total

    def grads(self, losses: list[Tensor]) -> dict[str, Tensor]:
        """Return the gradient of the summed losses by parameter name; parameters that were not used are left out."""
        if not self.named:
            raise ValueError("no parameter requires a gradient; pass grads=False to compare logits alone")
        grads = torch.autograd.grad(torch.stack(losses).sum(), [p for _, p in self.named], allow_unused=True)
        return {name: grad.double() for (name, _), grad in zip(self.named, grads, strict=True) if grad is not None}

    def rounded(
        self, ids: Sequence[Tensor], weights: Sequence[Tensor] | None, seed: int
    ) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
        """Run `alone` with the embedded tokens rounded anew, `ROUNDINGS` times; not at all without an embedding."""
        embedding, runs = input_embedding(self.model), []
        if embedding is None:
            return []
        for number in range(ROUNDINGS):
            with perturbed_rounding(embedding, seed + number):
                runs.append(self.alone(ids, weights))
        return runs

    def reached(
        self, ids: Sequence[Tensor], weights: Sequence[Tensor], bound: float
    ) -> tuple[tuple[int, int, float], ...]:
        """List the pairs (j, i) where sequence i's logits have a gradient at tokens of sequence j."""
        embedding = input_embedding(self.model)
        if embedding is None:
            return ()
        with torch.enable_grad(), watched(embedding) as leaves:
            flat = self.logits(self.run_packed(self.model, self.row(ids)), self.geometry.total)
            parts = [flat[start : start + length] for start, length in self.spans]
            losses = [_loss(part, weight) for part, weight in zip(parts, weights, strict=True)]
            norms = reach(losses, leaves, self.spans, self.geometry.total)
        own = norms.diagonal().clamp(min=1e-300)
        pairs = [(j, i, float(norms[i, j] / own[i])) for i in range(len(ids)) for j in range(len(ids)) if i != j]
        return tuple(sorted((pair for pair in pairs if pair[2] > bound), key=lambda pair: -pair[2]))

    def moved(
        self, ids: Sequence[Tensor], others: Sequence[Tensor], before: Sequence[Tensor], bound: float
    ) -> tuple[tuple[int, int, float], ...]:
        """Change one sequence at a time, and list the others whose logits move."""
        pairs = []
        for changed in range(len(ids)):
            after, _ = self.packed([others[i] if i == changed else piece for i, piece in enumerate(ids)], None)
            for index in range(len(ids)):
                error = relative_error(after[index], before[index])
                if index != changed and error > bound:
                    pairs.append((changed, index, error))
        return tuple(sorted(pairs, key=lambda pair: -pair[2]))

    def origin(self, ids: Sequence[Tensor], bound: float) -> Origin | None:
        """Return the module that leaks first."""
        row = self.row(ids)
        alone = [lambda piece=piece: self.run_alone(self.model, piece) for piece in ids]
        return find_origin(
            self.model, lambda: self.run_packed(self.model, row), alone, self.spans, self.geometry.total, bound
        )


def _loss(logits: Tensor, weights: Tensor) -> Tensor:
    """Return a scalar that depends on every token's whole distribution, in proportion to the token's weight."""
    spread = torch.linspace(-1.0, 1.0, logits.shape[1], device=logits.device)
    return (logits.float().log_softmax(-1) @ spread * weights).sum() + (logits.float() @ spread * weights).sum()


def _logit_bound(bound: float, alone: list[Tensor], noisy: list[list[Tensor]]) -> float:
    """Return the largest allowed error of logits, given those of other roundings."""
    noise = (relative_error(a, b) for others in noisy for a, b in zip(others, alone, strict=True))
    return max(bound, min(NOISE * max(noise, default=0.0), MOST[0]))


def _worst_grad(
    packed: dict[str, Tensor], alone: dict[str, Tensor], noisy: list[dict[str, Tensor]], bound: float
) -> tuple[tuple[str, float], float]:
    """Return the parameter whose relative gradient error is furthest over its bound, with the error, and the bound.

    Next to nothing is measured against the rest. `noisy`: the gradients of other roundings, where they are known.
    """
    floor = 1e-3 * max(float(g.norm() / g.numel() ** 0.5) for g in alone.values())

    def error(other: dict[str, Tensor], name: str) -> float:
        if name not in other or name not in alone:
            return 1.0
        size = max(float(alone[name].norm()), floor * alone[name].numel() ** 0.5)
        gap = float((other[name] - alone[name]).norm()) / size
        return gap if gap == gap else float("inf")

    names = sorted(packed.keys() | alone.keys())
    errors = {name: error(packed, name) for name in names}
    noise = {name: max((error(others, name) for others in noisy), default=0.0) for name in names}
    limits = {name: max(bound, min(NOISE * noise[name], MOST[1])) for name in names}
    worst = max(names, key=lambda name: errors[name] / limits[name])
    return (worst, errors[worst]), limits[worst]


def _vocabulary(model: nn.Module) -> int:
    """Return the number of rows of the input embedding."""
    table = input_embedding(model)
    if table is None or not isinstance(table.weight, Tensor):
        raise ValueError("the model has no input embedding; pass vocab_size")
    return int(table.weight.shape[0])


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch every submodule to eval mode and back to what each was."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
