"""The Triton kernels of `engines.fast.log_prob_kernels`; imported on a GPU alone."""

# mypy: disable-error-code="no-untyped-def, import-not-found"
import triton
import triton.language as tl


@triton.jit
def statistics_kernel(
    logits, targets, log_probs, normalizers, entropies, vocabulary, inverse, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):
    """Run one program a row: every lane keeps the maximum and the sums of its own columns, joined at the end."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * vocabulary
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocabulary, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(start + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) * inverse
        higher = tl.maximum(highest, x)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade, share = tl.exp(highest - base), tl.exp(x - base)
        total = total * fade + share
        if ENTROPY:
            weighted = weighted * fade + tl.where(column < vocabulary, share * x, 0.0)
        highest = higher
    peak = tl.max(highest, 0)
    fade = tl.exp(highest - peak)
    all_of_it = tl.sum(total * fade, 0)
    normaliser = peak + tl.log(all_of_it)
    tl.store(normalizers + row, normaliser)
    target = tl.load(targets + row)
    tl.store(log_probs + row, tl.load(start + target).to(tl.float32) * inverse - normaliser)
    if ENTROPY:
        tl.store(entropies + row, normaliser - tl.sum(weighted * fade, 0) / all_of_it)


@triton.jit
def gradient_kernel(
    logits,
    targets,
    normalizers,
    grad_log_probs,
    entropies,
    grad_entropies,
    vocabulary,
    inverse,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program a block of a row: logits are overwritten by their gradient."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocabulary
    place = logits + row * vocabulary + column
    gradient = tl.load(grad_log_probs + row)
    log_p = tl.load(place, mask=inside, other=0.0).to(tl.float32) * inverse - tl.load(normalizers + row)
    p = tl.exp(log_p)
    result = tl.where(column == tl.load(targets + row), gradient, 0.0) - p * gradient
    if ENTROPY:
        result -= p * (log_p + tl.load(entropies + row)) * tl.load(grad_entropies + row)
    tl.store(place, (result * inverse).to(logits.dtype.element_ty), mask=inside)
