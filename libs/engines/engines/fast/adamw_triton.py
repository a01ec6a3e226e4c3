"""The Triton kernel of `engines.fast.adamw`; imported on a GPU alone."""

# mypy: disable-error-code="no-untyped-def, import-not-found"
import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    weight,
    rest,
    first,
    second,
    grad,
    controls,
    count,
    lr,
    beta1,
    beta2,
    eps,
    weight_decay,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run one program a block: nothing is written where the factor is NaN."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale, correct1, correct2 = tl.load(controls), tl.load(controls + 1), tl.load(controls + 2)
    inside = (place < count) & (scale == scale)
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32) * scale
    if SPLIT:
        high = tl.load(weight + place, mask=inside, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        low = tl.load(rest + place, mask=inside, other=0).to(tl.int32)
        x = (high + low).to(tl.float32, bitcast=True)
    else:
        x = tl.load(weight + place, mask=inside, other=0.0)
    m = tl.load(first + place, mask=inside, other=0.0)
    v = tl.load(second + place, mask=inside, other=0.0)
    x = x * (1.0 - lr * weight_decay)
    m = m + (g - m) * (1.0 - beta1)
    v = v * beta2 + g * g * (1.0 - beta2)
    x = x - lr * correct1 * m / (tl.sqrt(v * correct2) + eps)
    tl.store(first + place, m, mask=inside)
    tl.store(second + place, v, mask=inside)
    if SPLIT:
        y = x.to(tl.bfloat16)
        left = x.to(tl.int32, bitcast=True) - (y.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(rest + place, tl.minimum(left, 32767).to(tl.int16), mask=inside)
        tl.store(weight + place, y, mask=inside)
    else:
        tl.store(weight + place, x, mask=inside)
